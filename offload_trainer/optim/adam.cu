// The GPU update kernel: one step of AdamW over pages of optimizer state in GPU memory. Its results equal those of
// native/adam.cpp bit for bit, except for the bits of NaNs.
//
//     grad (16 bit) -> x scale -> moments as stored -> fp32 -> Adam -> moments as stored
//                                                  master (fp32, in place) -> out (16 bit)
//
// cuda_adam.py compiles this with NVRTC for the device that is present. It defines FUSES as in native/numbers.h, and
// PAGES_BYTES, the size of its own Pages. A warp processes 256 elements, which share a scale in 8 bits, so every byte
// crosses the memory bus once and warps do not wait for each other. Each operation is an intrinsic that rounds to
// nearest even: from operators a compiler may form an FMA, which changes the last bit. Subnormal numbers are not
// flushed to zero.

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#define __grid_constant__
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

enum Type : u32 { NONE, F32, F16, BF16 };  // rules.py has the same numbers

constexpr u32 BLOCK = 256;               // elements per warp
constexpr u32 LANES = 32, WARPS = 8;     // threads per warp, warps per thread block; cuda_adam.py has the same
constexpr u32 RUN = 4;                   // consecutive elements that a thread processes at a time: 16 bytes of fp32
constexpr u32 RUNS = BLOCK / LANES / RUN;  // runs per thread
constexpr u32 PARTS = 64;                // parts per launch; cuda_adam.py has the same

// -- the argument, with the same fields as in cuda_adam.py ------------------------------------------------------------

struct AdamStep {  // constants of one step: native/adam.cpp has the same
    float scale;            // factor on the gradient
    float keep;             // 1 - lr x decay
    float lerp;             // 1 - beta1 if that is below 1/2, else -beta1
    u32 from_gradient;      // 1: `lerp` starts from the gradient (1 - beta1 is at least 1/2); 0: from exp_avg
    float beta2;
    float rest2;            // 1 - beta2
    float root_correction;  // sqrt(1 - beta2 ^ step)
    float eps;
    float minus_step_size;  // -lr / (1 - beta1 ^ step)
};

struct Part {  // elements [start, end) that share hyperparameters and step number
    u32 start, end;
    AdamStep step;
};

struct Cell {  // the value of a code of second moments, and the distance to the next code (moments.py, cells())
    float end, way;
};

struct Moment {  // the first or the second
    void* values;
    float* scales;     // only with 8-bit moments
    const float* map;  // values of the 256 codes; only used with 8-bit moments
    u32 keys[2];       // keys of the random bits
};

struct Page {
    float* master;
    Moment moments[2];
    const void* grad;
    void* out;
    const u32* nearest;  // moments.py, nearest_table(True)
    const u32* lower;    // moments.py, lower_table()
    const Cell* cells;   // moments.py, cells()
    u64 first;           // index of the page's first element in its unit
    Type grad_type, out_type;
};

struct Pages {  // pages of equal size that follow each other in their unit
    Page page;     // the first one
    u64 apart;     // bytes from a page's state to the next page's; gradients and new weights follow without a gap
    u32 elements;  // of each page, a multiple of BLOCK if there are several
    u32 begin;     // start of the first part, a multiple of BLOCK
    u32 parts;
    Part part[PARTS];  // in elements of all pages, ascending; each starts at a multiple of BLOCK, and ends at one or at
                       // the end of the last page
};

static_assert(sizeof(Pages) == PAGES_BYTES, "cuda_adam.py has other Pages");

// -- numbers ----------------------------------------------------------------------------------------------------------

constexpr u32 MAGNITUDE = 0x7fffffff, INFINITE = 0x7f800000;

__device__ inline u32 bits(float value) { return __float_as_uint(value); }
__device__ inline float number(u32 word) { return __uint_as_float(word); }

__device__ inline float fused(float a, float b, float c) {
#if FUSES
    return __fmaf_rn(a, b, c);
#else
    return __fadd_rn(__fmul_rn(a, b), c);
#endif
}

// native/numbers.h explains these four conversions.

__device__ inline float from_bf16(u16 word) { return number(u32(word) << 16); }

// Add `below` to the bits below bf16's last place, and truncate; a carry rounds up.
__device__ inline u16 cut_bf16(float value, u32 below) {
    const u32 word = bits(value);
    return u16((word & MAGNITUDE) > INFINITE ? word >> 16 | 0x40 : (word + below) >> 16);
}

__device__ inline u16 to_bf16(float value) { return cut_bf16(value, 0x7fff + (bits(value) >> 16 & 1)); }

__device__ inline float from_f16(u16 word) {
    const u32 magnitude = u32(word & 0x7fff) << 13;
    const u32 finite = bits(__fmul_rn(number(magnitude), 0x1p112f));
    return number((magnitude >= 0x0f800000 ? magnitude | INFINITE : finite) | u32(word & 0x8000) << 16);
}

__device__ inline u16 to_f16(float value) {
    const u32 magnitude = bits(value) & MAGNITUDE;
    const u32 normal = ((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112 << 10);
    const u32 subnormal = bits(__fadd_rn(number(magnitude), 0.5f)) - bits(0.5f);
    u32 word = magnitude < 0x38800000 ? subnormal : normal < 0x7c00 ? normal : 0x7c00;
    word = magnitude > INFINITE ? 0x7e00 | (magnitude >> 13 & 0x3ff) : word;
    return u16(word | (bits(value) >> 16 & 0x8000));
}

// Return 16 random bits for an element of a unit (moments.py, random_bits).
__device__ inline u32 chance(const u32 keys[2], u64 element) {
    u32 x = u32(element) + keys[0];
    x = (x ^ x >> 16) * 0x7feb352du + keys[1] + u32(element >> 32) * 0x9e3779b9u;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return (x ^ x >> 16) & 0xffff;
}

// -- loading and storing runs of elements -----------------------------------------------------------------------------

template <typename T>
struct alignas(RUN * sizeof(T)) Run {
    T of[RUN];
};

// Load the first `count` elements of a run; a whole run is one memory access.
template <typename T>
__device__ inline Run<T> load(const void* values, u32 at, u32 count) {
    const T* from = static_cast<const T*>(values) + at;
    if (count == RUN) return *reinterpret_cast<const Run<T>*>(from);
    Run<T> run;
#pragma unroll
    for (u32 i = 0; i < RUN; i++) run.of[i] = i < count ? from[i] : T(0);
    return run;
}

template <typename T>
__device__ inline void store(const Run<T>& run, void* values, u32 at, u32 count) {
    T* to = static_cast<T*>(values) + at;
    if (count == RUN) {
        *reinterpret_cast<Run<T>*>(to) = run;
        return;
    }
#pragma unroll
    for (u32 i = 0; i < RUN; i++)
        if (i < count) to[i] = run.of[i];
}

// A run of gradients in their storage format.
union Read {
    Run<float> whole;
    Run<u16> half;
};

__device__ inline Read load_gradient(const Page& page, u32 at, u32 count) {
    Read read;
    if (page.grad_type == F32)
        read.whole = load<float>(page.grad, at, count);
    else
        read.half = load<u16>(page.grad, at, count);
    return read;
}

__device__ inline float gradient(const Page& page, const Read& read, u32 i) {
    if (page.grad_type == F32) return read.whole.of[i];
    return page.grad_type == BF16 ? from_bf16(read.half.of[i]) : from_f16(read.half.of[i]);
}

__device__ inline void store_rounded(const Page& page, const Run<float>& master, u32 at, u32 count) {
    if (page.out_type == NONE) return;
    if (page.out_type == F32) return store(master, page.out, at, count);
    Run<u16> rounded;
#pragma unroll
    for (u32 i = 0; i < RUN; i++) rounded.of[i] = page.out_type == BF16 ? to_bf16(master.of[i]) : to_f16(master.of[i]);
    store(rounded, page.out, at, count);
}

// -- moments as stored: float, u16 (bf16) or u8 (a code) --------------------------------------------------------------

__device__ inline float widened(const Moment&, float value, float) { return value; }
__device__ inline float widened(const Moment&, u16 value, float) { return from_bf16(value); }
__device__ inline float widened(const Moment& moment, u8 code, float scale) {
    return __fmul_rn(moment.map[code], scale);
}

__device__ inline u8 nearest_code(const Page& page, float scaled) {
    const u32 word = bits(scaled), negative = word >> 31;
    const u32 entry = page.nearest[negative * 0x3f81 + (word >> 16 & 0x7fff)];
    return u8((entry + (word & 0xffff)) >> 16 ^ (0 - negative));
}

__device__ inline u8 code_stochastically(const Page& page, float scaled, u32 random) {
    const u32 entry = page.lower[min(bits(scaled) >> 16, 0x3f80u)];  // `scaled` is in [0, 1] unless data is damaged
    const u32 code = (entry + (bits(scaled) & 0xffff)) >> 16;
    const Cell cell = page.cells[code];
    const float threshold = __fmul_rn(__uint2float_rn(random * 2 + 1), 0x1p-17f);
    const u32 chosen = code + (__fsub_rn(scaled, cell.end) > __fmul_rn(threshold, cell.way));
    return u8(chosen | (chosen == 0 && scaled > 0));
}

// Return the bits of the greatest magnitude of a warp's values. As integers the bits have the order of the numbers,
// with NaN above all.
__device__ inline u32 greatest_magnitude(const Run<float> runs[RUNS], const u32 counts[RUNS]) {
    u32 greatest = 0;
#pragma unroll
    for (u32 r = 0; r < RUNS; r++)
#pragma unroll
        for (u32 i = 0; i < RUN; i++)
            if (i < counts[r]) greatest = max(greatest, bits(runs[r].of[i]) & MAGNITUDE);
#pragma unroll
    for (u32 other = LANES / 2; other; other /= 2) greatest = max(greatest, __shfl_xor_sync(~0u, greatest, other));
    return greatest;
}

// Store a thread's runs, which are LANES x RUN elements apart, the first at `at`. The last argument selects the format.
template <bool SECOND>
__device__ inline void narrow(const Page& page, const Run<float> runs[RUNS], u32 at, const u32 counts[RUNS], float) {
#pragma unroll
    for (u32 r = 0; r < RUNS; r++) store(runs[r], page.moments[SECOND].values, at + r * LANES * RUN, counts[r]);
}

template <bool SECOND>
__device__ inline void narrow(const Page& page, const Run<float> runs[RUNS], u32 at, const u32 counts[RUNS], u16) {
    const Moment& moment = page.moments[SECOND];
#pragma unroll
    for (u32 r = 0; r < RUNS; r++) {
        const u32 here = at + r * LANES * RUN;
        Run<u16> rounded;
#pragma unroll
        for (u32 i = 0; i < RUN; i++)
            rounded.of[i] = cut_bf16(runs[r].of[i], chance(moment.keys, page.first + here + i));
        store(rounded, moment.values, here, counts[r]);
    }
}

template <bool SECOND>
__device__ inline void narrow(const Page& page, const Run<float> runs[RUNS], u32 at, const u32 counts[RUNS], u8) {
    const Moment& moment = page.moments[SECOND];
    const u32 greatest = greatest_magnitude(runs, counts);
    const float scale = number(greatest);
    const bool usable = greatest != 0 && greatest < INFINITE;
    if (at % BLOCK == 0) moment.scales[at / BLOCK] = scale;
#pragma unroll
    for (u32 r = 0; r < RUNS; r++) {
        const u32 here = at + r * LANES * RUN;
        Run<u8> codes;
#pragma unroll
        for (u32 i = 0; i < RUN; i++) {
            const float scaled = usable ? __fdiv_rn(runs[r].of[i], scale) : 0.0f;  // 0 gives the code of zero
            codes.of[i] = SECOND ? code_stochastically(page, scaled, chance(moment.keys, page.first + here + i))
                                 : nearest_code(page, scaled);
        }
        store(codes, moment.values, here, counts[r]);
    }
}

// -- the update -------------------------------------------------------------------------------------------------------

// The same operations in the same order as adam.cpp's `adam`.
__device__ inline void adam(const AdamStep& step, float g, float& master, float& exp_avg, float& exp_avg_sq) {
    const float m = fused(step.lerp, __fsub_rn(g, exp_avg), step.from_gradient ? g : exp_avg);
    const float v = fused(__fmul_rn(step.rest2, g), g, __fmul_rn(exp_avg_sq, step.beta2));
    const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), step.root_correction), step.eps);
    exp_avg = m;
    exp_avg_sq = v;
    master = __fadd_rn(__fmul_rn(master, step.keep), __fdiv_rn(__fmul_rn(step.minus_step_size, m), denominator));
}

constexpr u32 MOMENTS = 2;

// Update a warp's 256 elements from `block` on; `WHOLE`: all of them are in the part.
template <typename T, bool WHOLE>
__device__ inline void update_block(const Page& page, const Part& part, u32 block) {
    const u32 at = block + threadIdx.x % LANES * RUN;
    u32 counts[RUNS];
    Read grad[RUNS];
    Run<T> stored[MOMENTS][RUNS];
    Run<float> master[RUNS], wide[MOMENTS][RUNS];
    float scales[MOMENTS] = {};
#pragma unroll
    for (u32 m = 0; m < MOMENTS; m++)
        if (sizeof(T) == 1) scales[m] = page.moments[m].scales[block / BLOCK];
#pragma unroll
    for (u32 r = 0; r < RUNS; r++) {  // issue all loads before waiting for any
        const u32 here = at + r * LANES * RUN;
        counts[r] = WHOLE ? RUN : here < part.end ? min(RUN, part.end - here) : 0;
        grad[r] = load_gradient(page, here, counts[r]);
#pragma unroll
        for (u32 m = 0; m < MOMENTS; m++) stored[m][r] = load<T>(page.moments[m].values, here, counts[r]);
        master[r] = load<float>(page.master, here, counts[r]);
    }
#pragma unroll
    for (u32 r = 0; r < RUNS; r++) {
        const u32 here = at + r * LANES * RUN;
#pragma unroll
        for (u32 i = 0; i < RUN; i++) {
            float moments[MOMENTS];
#pragma unroll
            for (u32 m = 0; m < MOMENTS; m++)
                moments[m] = widened(page.moments[m], stored[m][r].of[i], scales[m]);
            const float g = __fmul_rn(gradient(page, grad[r], i), part.step.scale);
            adam(part.step, g, master[r].of[i], moments[0], moments[1]);
#pragma unroll
            for (u32 m = 0; m < MOMENTS; m++) wide[m][r].of[i] = moments[m];
        }
        store(master[r], page.master, here, counts[r]);
        store_rounded(page, master[r], here, counts[r]);
    }
    narrow<false>(page, wide[0], at, counts, T());
    narrow<true>(page, wide[1], at, counts, T());
}

template <typename T>
__device__ inline void advance(T*& address, u64 bytes) {
    address = (T*)((const u8*)address + bytes);
}

// Return page `number`. Addresses that the format or the caller does not use are null in the first page, and are not
// read in any.
__device__ inline Page page_of(const Pages& pages, u32 number) {
    Page page = pages.page;
    const u64 state = number * pages.apart, elements = u64(number) * pages.elements;
    advance(page.master, state);
#pragma unroll
    for (u32 m = 0; m < 2; m++) {
        advance(page.moments[m].values, state);
        advance(page.moments[m].scales, state);
    }
    advance(page.grad, elements * (page.grad_type == F32 ? 4 : 2));
    advance(page.out, elements * (page.out_type == F32 ? 4 : 2));
    page.first += elements;
    return page;
}

template <typename T>
__device__ inline void update(const Pages& pages) {
    const u32 block = pages.begin + (blockIdx.x * WARPS + threadIdx.x / LANES) * BLOCK;
    u32 p = 0;
    while (p < pages.parts && pages.part[p].end <= block) p++;
    if (p == pages.parts || block < pages.part[p].start) return;  // uniform in a warp, as `__shfl_xor_sync` requires
    const Part part = pages.part[p];
    const Page page = page_of(pages, block / pages.elements);
    if (part.end - block >= BLOCK)
        update_block<T, true>(page, part, block % pages.elements);
    else
        update_block<T, false>(page, part, block);  // there is one page: several have whole blocks only
}

#define KERNEL(name, T) \
    __global__ void __launch_bounds__(LANES* WARPS) name(const __grid_constant__ Pages it) { update<T>(it); }

extern "C" {

KERNEL(adamw_fp32, float)
KERNEL(adamw_bf16, u16)
KERNEL(adamw_8bit, u8)

}
