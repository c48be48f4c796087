// A persistent thread pool for the CPU kernels.
//
//     caller   offers places ── works ── offers none any more ── waits until those who took one have finished
//     worker       sees an offer ── takes a place ── works ── waits for the next offer: spins, then sleeps
//
// A worker that is late finds no place, and the caller does not wait for it. Calls are serialised by a mutex.
// A forked child has only the thread that forked, and creates a new pool.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace {

// How long a waiting thread spins before it sleeps: longer than Python needs between two pages.
constexpr std::chrono::microseconds AWAKE(100);

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spin for up to AWAKE; return whether `done` became true.
template <class Condition>
bool soon(Condition done) {
    const auto end = std::chrono::steady_clock::now() + AWAKE;
    do {
        for (int i = 0; i < 16; i++) {
            if (done()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

class Crew {
   public:
    using Work = void (*)(void*);

    // Run work(argument) on this thread and on up to `helpers` others at the same time, until all have returned.
    void run(Work work, void* argument, int helpers) {
        if (helpers <= 0) return work(argument);  // without its turn: another call may take long
        std::lock_guard<std::mutex> mine(turn_);
        while (members_ < helpers && begin()) members_++;
        helpers = std::min(helpers, members_);  // the system may refuse more
        if (helpers <= 0) return work(argument);
        work_ = work, argument_ = argument, finished_ = 0, taken_ = -1;
        places_ = helpers;  // from here on workers read what is set above
        offers_++;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            for (int i = std::min(helpers, asleep_); i > 0; i--) opened_.notify_one();
        }
        work(argument);
        taken_ = helpers - std::max(0, places_.exchange(0));
        const auto done = [this] { return finished_ == taken_; };
        if (soon(done)) return;
        std::unique_lock<std::mutex> lock(mutex_);
        left_.wait(lock, done);
    }

   private:
    // Start one more thread with all signals blocked; return whether that succeeded.
    bool begin() {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        const uint32_t seen = offers_;
        bool made = true;
        try {
            std::thread([this, seen] { serve(seen); }).detach();
        } catch (const std::system_error&) {
            made = false;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return made;
    }

    void serve(uint32_t seen) {
        for (;;) {
            const auto news = [this, seen] { return offers_ != seen; };
            if (!soon(news)) {
                std::unique_lock<std::mutex> lock(mutex_);
                asleep_++;
                opened_.wait(lock, news);
                asleep_--;
            }
            seen = offers_;
            if (places_.fetch_sub(1) <= 0) continue;
            work_(argument_);
            if (++finished_ == taken_) {
                std::lock_guard<std::mutex> lock(mutex_);  // or the caller could miss it as it goes to sleep
                left_.notify_one();
            }
        }
    }

    std::mutex turn_, mutex_;
    std::condition_variable opened_, left_;
    std::atomic<uint32_t> offers_{0};  // their number
    std::atomic<int> places_{0};       // that are left; negative if workers came too late
    std::atomic<int> taken_{-1}, finished_{0};
    Work work_ = nullptr;
    void* argument_ = nullptr;
    int members_ = 0, asleep_ = 0;
};

// The pool is never destroyed, since its threads may still run while static objects are destroyed at exit.
std::atomic<Crew*> crew{nullptr};

inline Crew& the_crew() {
    static const int forks = pthread_atfork(nullptr, nullptr, [] { crew = nullptr; });
    (void)forks;
    if (Crew* there = crew) return *there;
    Crew *made = new Crew, *none = nullptr;
    if (crew.compare_exchange_strong(none, made)) return *made;
    delete made;
    return *none;
}

// Call `task(number)` for the numbers below `tasks` on up to `threads` threads, each of which claims the next number
// until all are done.
template <class Task>
void share(int64_t tasks, int32_t threads, const Task& task) {
    struct Call {
        const Task& task;
        int64_t tasks;
        std::atomic<int64_t> next{0};

        static void work(void* shared) {
            Call& call = *static_cast<Call*>(shared);
            for (int64_t number; (number = call.next.fetch_add(1, std::memory_order_relaxed)) < call.tasks;)
                call.task(number);
#ifdef __SSE2__
            _mm_sfence();  // without it non-temporal stores become visible to other threads in no particular order
#endif
        }
    } call{task, tasks};
    the_crew().run(Call::work, &call, int(std::min(int64_t(threads), tasks)) - 1);
}

}  // namespace
