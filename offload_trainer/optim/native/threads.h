// Threads that stay: a call that is shared wakes them, and they wait for the next one.
//
//     caller   opens the door ── works ── closes it ── waits until nobody is inside
//     worker        sees it open ── enters, works, leaves ── waits for the next opening: awake a moment, then asleep
//
// A worker that comes late finds the door closed and is not waited for. One call at a time; others wait their turn.
// A fork's child has no threads but the one that forked, and makes its own.
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

namespace {

// How long who waits stays awake: longer than Python needs from one page to the next, shorter than anyone would notice.
constexpr std::chrono::microseconds AWAKE(100);

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether `done` came true while awake.
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
        std::lock_guard<std::mutex> mine(turn_);
        helpers = std::min({helpers, int(MOST), have(helpers)});
        if (helpers <= 0) return work(argument);
        work_ = work, argument_ = argument;
        opening_++;
        door_ = uint64_t(opening_) << 32 | OPEN | uint64_t(helpers) << 12;
        wake(helpers);
        work(argument);
        door_ &= ~OPEN;
        const auto empty = [this] { return inside(door_) == 0; };
        if (soon(empty)) return;
        std::unique_lock<std::mutex> lock(mutex_);
        left_.wait(lock, empty);
    }

    // Have `helpers` threads besides the callers'. A new one has the calling thread's affinity to CPUs.
    void hire(int helpers) {
        std::lock_guard<std::mutex> mine(turn_);
        have(helpers);
    }

   private:
    // Of the door's bits the upper half counts openings, then OPEN, how many may be inside, and how many are.
    static constexpr uint64_t OPEN = uint64_t(1) << 31, MOST = (1 << 12) - 1;
    static uint32_t opening(uint64_t door) { return uint32_t(door >> 32); }
    static uint64_t inside(uint64_t door) { return door & MOST; }
    static uint64_t may_enter(uint64_t door) { return door >> 12 & MOST; }

    // How many threads there are, once there are `helpers` or the system gives no more.
    int have(int helpers) {
        while (members_ < helpers && begin()) members_++;
        return members_;
    }

    // One thread more, which takes no signals. Whether there is one.
    bool begin() {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        const uint32_t seen = opening_;
        bool made = true;
        try {
            std::thread([this, seen] { serve(seen); }).detach();
        } catch (const std::system_error&) {
            made = false;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return made;
    }

    void wake(int helpers) {
        std::lock_guard<std::mutex> lock(mutex_);
        for (int i = std::min(helpers, asleep_); i > 0; i--) opened_.notify_one();
    }

    void serve(uint32_t seen) {
        for (;;) {
            const auto news = [this, seen] { return opening(door_) != seen; };
            if (!soon(news)) {
                std::unique_lock<std::mutex> lock(mutex_);
                asleep_++;
                opened_.wait(lock, news);
                asleep_--;
            }
            uint64_t door = door_;
            seen = opening(door);
            while ((door & OPEN) && opening(door) == seen && inside(door) < may_enter(door))
                if (door_.compare_exchange_weak(door, door + 1)) {
                    work_(argument_);
                    leave();
                    break;
                }
        }
    }

    void leave() {
        const uint64_t door = --door_;
        if (inside(door) || (door & OPEN)) return;
        std::lock_guard<std::mutex> lock(mutex_);  // or the caller could miss it on its way to sleep
        left_.notify_one();
    }

    std::mutex turn_, mutex_;
    std::condition_variable opened_, left_;
    std::atomic<uint64_t> door_{0};
    Work work_ = nullptr;
    void* argument_ = nullptr;
    uint32_t opening_ = 0;
    int members_ = 0, asleep_ = 0;
};

// Never destroyed: its threads outlive whatever the end of the process destroys.
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

}  // namespace
