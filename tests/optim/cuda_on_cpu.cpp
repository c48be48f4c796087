// A stand-in for the CUDA driver and NVRTC, with the functions that nvrtc.py calls, over adam.cu compiled for the CPU.
//
// A thread block is a group of fibers, which switch wherever a thread waits for others (shuffles, ballots, warp
// barriers). The fibers run in ascending order in one block and in descending order in the next. A launch fails if a
// lane waits for one that has exited, or if no context is current. The intrinsics are single IEEE operations with a
// GPU's NaN, so this is built with -ffp-contract=off.

#include <ucontext.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __shared__ static
#define __launch_bounds__(threads)

namespace {

struct Index {
    unsigned x;
} threadIdx, blockIdx;

unsigned __float_as_uint(float value) {
    unsigned word;
    std::memcpy(&word, &value, sizeof word);
    return word;
}

float __uint_as_float(unsigned word) {
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

// A GPU has only one NaN. Rounding it to bf16 like a number would give zero.
float given(float value) { return value != value ? __uint_as_float(0x7fffffff) : value; }

float __fadd_rn(float a, float b) { return given(a + b); }
float __fsub_rn(float a, float b) { return given(a - b); }
float __fmul_rn(float a, float b) { return given(a * b); }
float __fdiv_rn(float a, float b) { return given(a / b); }
float __fsqrt_rn(float a) { return given(std::sqrt(a)); }
float __fmaf_rn(float a, float b, float c) { return given(std::fma(a, b, c)); }
float __uint2float_rn(unsigned a) { return float(a); }
unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }
unsigned __popc(unsigned a) { return unsigned(__builtin_popcount(a)); }

// -- fibers -----------------------------------------------------------------------------------------------------------

constexpr size_t STACK = 64 << 10;

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(STACK);
    bool done;
    unsigned waits, given;
};

std::vector<Fiber> fibers;
ucontext_t turns;
bool broken;
void (*body)();

void pass() {
    Fiber& self = fibers[threadIdx.x];
    swapcontext(&self.context, &turns);
}

void run_fiber() {
    body();
    fibers[threadIdx.x].done = true;
    pass();
}

void run_block(unsigned threads, bool upwards) {
    if (fibers.size() < threads) fibers.resize(threads);
    for (unsigned t = 0; t < threads; t++) {
        Fiber& fiber = fibers[t];
        fiber.done = false, fiber.waits = 0;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = STACK;
        makecontext(&fiber.context, run_fiber, 0);
    }
    for (bool all = false; !all;) {
        all = true;
        for (unsigned i = 0; i < threads; i++) {
            threadIdx.x = upwards ? i : threads - 1 - i;
            if (fibers[threadIdx.x].done) continue;
            all = false;
            swapcontext(&turns, &fibers[threadIdx.x].context);
        }
    }
}

unsigned __shfl_xor_sync(unsigned mask, unsigned value, unsigned lanes) {
    const unsigned me = threadIdx.x;
    fibers[me].given = value, fibers[me].waits++;
    pass();
    const Fiber& other = fibers[me ^ lanes];
    broken |= mask != ~0u || other.done || other.waits != fibers[me].waits;
    const unsigned result = other.given;
    pass();
    return result;
}

unsigned __ballot_sync(unsigned mask, bool value) {
    const unsigned me = threadIdx.x, first = me / 32 * 32;
    fibers[me].given = value, fibers[me].waits++;
    pass();
    unsigned result = 0;
    for (unsigned lane = 0; lane < 32; lane++) {
        const Fiber& other = fibers[first + lane];
        broken |= mask != ~0u || other.done || other.waits != fibers[me].waits;
        result |= other.given << lane;
    }
    pass();
    return result;
}

void __syncwarp() { __ballot_sync(~0u, false); }

}  // namespace

#define FUSES 1
namespace with_fma {
#include "adam.cu"
}
#undef FUSES
#define FUSES 0
#define adamw_fp32 adamw_fp32_without
#define adamw_bf16 adamw_bf16_without
#define adamw_8bit adamw_8bit_without
namespace without_fma {
#include "adam.cu"
}
#undef adamw_fp32
#undef adamw_bf16
#undef adamw_8bit

namespace {

const void* argument;

template <typename Pages>
void with_argument(void kernel(Pages)) {
    kernel(*static_cast<const Pages*>(argument));
}

template <auto kernel>
void call() {
    with_argument(kernel);
}

struct Named {
    std::string name;
    void (*fused)();
    void (*unfused)();
};

const Named KERNELS[] = {
    {"adamw_fp32", call<with_fma::adamw_fp32>, call<without_fma::adamw_fp32_without>},
    {"adamw_bf16", call<with_fma::adamw_bf16>, call<without_fma::adamw_bf16_without>},
    {"adamw_8bit", call<with_fma::adamw_8bit>, call<without_fma::adamw_8bit_without>},
};

struct Program {
    std::string source, options;
};

thread_local int context_depth = 0;
int primary;  // its address is the context
std::string last_options;

}  // namespace

extern "C" {

const char* emulated_options() { return last_options.c_str(); }

// -- the driver -------------------------------------------------------------------------------------------------------

int cuInit(unsigned) { return 0; }
int cuDeviceGet(int* device, int) { return *device = 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = &primary, 0; }
int cuCtxPushCurrent_v2(void* context) { return context == &primary ? context_depth++, 0 : 201; }
int cuCtxPopCurrent_v2(void**) { return context_depth-- > 0 ? 0 : 201; }
int cuGetErrorName(int error, const char** name) {
    *name = error == 201 ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR_LAUNCH_FAILED";
    return 0;
}
int cuModuleLoadData(void** module, const void* image) {
    *module = std::strstr(static_cast<const char*>(image), "-DFUSES=1") ? &broken : nullptr;
    return context_depth ? 0 : 201;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
    for (const Named& kernel : KERNELS)
        if (kernel.name == name) return *function = reinterpret_cast<void*>(module ? kernel.fused : kernel.unfused), 0;
    return 500;
}
int cuLaunchKernel(void* function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned,
                   void* stream, void** parameters, void**) {
    if (!context_depth || stream != nullptr) return 201;
    const with_fma::Pages pages = *static_cast<const with_fma::Pages*>(parameters[0]);
    argument = &pages, body = reinterpret_cast<void (*)()>(function), broken = false;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) run_block(threads, blockIdx.x % 2);
    return broken ? 719 : 0;
}

// -- NVRTC ------------------------------------------------------------------------------------------------------------

int nvrtcVersion(int* major, int* minor) { return *major = 1, *minor = 2, 0; }
int nvrtcGetNumSupportedArchs(int* count) { return *count = 2, 0; }
int nvrtcGetSupportedArchs(int* found) { return found[0] = 70, found[1] = 90, 0; }
const char* nvrtcGetErrorString(int) { return "emulated error"; }
int nvrtcCreateProgram(Program** program, const char* source, const char*, int, const char**, const char**) {
    *program = new Program{source, ""};
    return 0;
}
int nvrtcCompileProgram(Program* program, int count, const char** options) {
    for (int i = 0; i < count; i++) program->options += std::string(options[i]) + " ";
    last_options = program->options;
    return program->source.find("adamw_8bit") == std::string::npos ? 6 : 0;
}
int nvrtcGetProgramLogSize(Program*, size_t* size) { return *size = 10, 0; }
int nvrtcGetProgramLog(Program*, char* log) { return std::memcpy(log, "not today", 10), 0; }
int nvrtcGetCUBINSize(Program* program, size_t* size) { return *size = program->options.size() + 1, 0; }
int nvrtcGetCUBIN(Program* program, char* code) {
    return std::memcpy(code, program->options.c_str(), program->options.size() + 1), 0;
}
int nvrtcGetPTXSize(Program* program, size_t* size) { return nvrtcGetCUBINSize(program, size); }
int nvrtcGetPTX(Program* program, char* code) { return nvrtcGetCUBIN(program, code); }
int nvrtcDestroyProgram(Program** program) { return delete *program, *program = nullptr, 0; }

}
