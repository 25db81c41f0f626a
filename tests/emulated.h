// CUDA C++ on the CPU, for the tests: the threads of a block are fibers that take turns where they wait for each other.

#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <vector>

#undef INFINITY
#undef NAN
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define __shared__ static

typedef unsigned int u32;
typedef unsigned short u16;
struct Index { u32 x = 0, y = 0, z = 0; };
static Index gridDim, blockDim, blockIdx, threadIdx;
static int *dynamic_shared;

// Fibers

struct Meeting { u32 members = 0, waiting = 0, round = 0; };
struct Fiber { ucontext_t context; bool done = false; };
static std::vector<Fiber> fibers;
static std::vector<Meeting> warps;
static Meeting block;
static ucontext_t scheduler;

static void yield() { swapcontext(&fibers[threadIdx.x].context, &scheduler); }

static void open_if_complete(Meeting &meeting) {
    if (meeting.waiting != meeting.members) return;
    meeting.waiting = 0;
    meeting.round++;
}

static void meet(Meeting &meeting) {
    u32 round = meeting.round;
    meeting.waiting++;
    open_if_complete(meeting);
    while (meeting.round == round) yield();
}

static std::function<void()> body;

static void run_fiber() {
    body();
    fibers[threadIdx.x].done = true;
    for (Meeting *meeting : {&block, &warps[threadIdx.x / 32]}) {
        meeting->members--;
        if (meeting->waiting) open_if_complete(*meeting);
    }
    yield();
}

static void run_block(u32 threads) {
    const size_t STACK = 128 << 10;
    static std::vector<char> stacks;
    stacks.resize(threads * STACK);
    fibers.assign(threads, {});
    warps.assign((threads + 31) / 32, {});
    block = {threads, 0, 0};
    for (u32 i = 0; i < threads; i++) {
        warps[i / 32].members++;
        ucontext_t &context = fibers[i].context;
        getcontext(&context);
        context.uc_stack.ss_sp = &stacks[i * STACK];
        context.uc_stack.ss_size = STACK;
        context.uc_link = nullptr;
        makecontext(&context, run_fiber, 0);
    }
    for (u32 left = threads, idle = 0; left; idle++) {
        if (idle > 100000) fprintf(stderr, "threads wait for each other for ever\n"), abort();
        for (u32 i = 0; i < threads; i++) {
            if (fibers[i].done) continue;
            threadIdx.x = i;
            swapcontext(&scheduler, &fibers[i].context);
            left -= fibers[i].done;
        }
    }
}

// What CUDA C++ provides

template <class A, class B> std::common_type_t<A, B> min(A a, B b) {
    std::common_type_t<A, B> x = a, y = b;
    return x < y ? x : y;
}
template <class A, class B> std::common_type_t<A, B> max(A a, B b) {
    std::common_type_t<A, B> x = a, y = b;
    return x > y ? x : y;
}
template <class To, class From> To bits_of(From from) {
    To to;
    static_assert(sizeof(to) == sizeof(from));
    memcpy(&to, &from, sizeof(to));
    return to;
}
static float __uint_as_float(u32 x) { return bits_of<float>(x); }
static float __int_as_float(int x) { return bits_of<float>(x); }
static u32 __float_as_uint(float x) { return bits_of<u32>(x); }
static float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
#define __expf expf
static int __popc(u32 x) { return __builtin_popcount(x); }
static float __ldcg(const float *at) { return *at; }
static int atomicAdd(int *at, int x) { return (*at += x) - x; }
static void __threadfence() {}
static void __syncthreads() { meet(block); }
static void __syncwarp() { meet(warps[threadIdx.x / 32]); }

// Everybody's value, by lane. The second meeting keeps them until all have looked.
template <class T, class Look> auto exchange(T own, Look look) {
    static T values[32][32];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    values[warp][lane] = own;
    __syncwarp();
    auto result = look(values[warp], lane);
    __syncwarp();
    return result;
}
template <class T> T __shfl_sync(u32, T x, int from, int width = 32) {
    return exchange(x, [=](T *values, u32 lane) { return values[lane / width * width + from % width]; });
}
template <class T> T __shfl_xor_sync(u32, T x, int mask) {
    return exchange(x, [=](T *values, u32 lane) { return values[lane ^ mask]; });
}
template <class T> T __shfl_up_sync(u32, T x, u32 by) {
    return exchange(x, [=](T *values, u32 lane) { return values[lane >= by ? lane - by : lane]; });
}
static u32 __match_any_sync(u32, int x) {
    return exchange(x, [=](int *values, u32) {
        u32 same = 0;
        for (int i = 0; i < 32; i++) same |= u32(values[i] == x) << i;
        return same;
    });
}

// instructions.cuh

static float from_float16(u16 bits) {
    int sign = bits >> 15, exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float x = exponent == 31 ? (mantissa ? __builtin_nanf("") : __builtin_inff())
            : exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24);
    return sign ? -x : x;
}
static u16 to_float16(float x) {
    u32 bits = __float_as_uint(x), sign = bits >> 16 & 0x8000;
    float size = fabsf(x);
    if (std::isnan(x)) return 0x7fff;
    if (size >= 65520.0f) return sign | 0x7c00;
    // The unit in the last place; rounding to it may carry into the exponent, as it should.
    int exponent = size < ldexpf(1, -14) ? -24 : ilogbf(size) - 10;
    int units = (int)nearbyintf(ldexpf(size, -exponent));
    return sign | (exponent == -24 ? units : (exponent + 25) * 1024 + units - 1024);
}
static u16 to_bfloat16(float x) {
    u32 bits = __float_as_uint(x);
    return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static u32 to_float16s(float first, float second) { return to_float16(first) | (u32)to_float16(second) << 16; }
static u32 to_bfloat16s(float first, float second) { return to_bfloat16(first) | (u32)to_bfloat16(second) << 16; }

static void multiply(float *sum, const u32 *a, u32 b0, u32 b1) {
    struct Piece { float a[4], b[2]; };
    auto tf32 = [](u32 x) { return __uint_as_float(x & 0xffffe000); };
    Piece own = {{tf32(a[0]), tf32(a[1]), tf32(a[2]), tf32(a[3])}, {tf32(b0), tf32(b1)}};
    exchange(own, [=](Piece *pieces, u32 lane) {
        u32 g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++)
            for (int k = 0; k < 8; k++)
                sum[i] += pieces[g * 4 + k % 4].a[i / 2 + k / 4 * 2] * pieces[(2 * t + i % 2) * 4 + k % 4].b[k / 4];
        return 0;
    });
}

// Launches

template <class T> T take(const char *arguments, size_t &at) {
    T value;
    at = (at + alignof(T) - 1) / alignof(T) * alignof(T);
    memcpy((void *)&value, arguments + at, sizeof(T));
    at += sizeof(T);
    return value;
}

template <class... Arguments>
void launch(void (*kernel)(Arguments...), Index grid, u32 threads, u32 shared_bytes, const char *arguments) {
    size_t at = 0;
    std::tuple<Arguments...> values{take<Arguments>(arguments, at)...};
    // What a kernel does not write is not zero.
    std::vector<int> memory(shared_bytes / 4 + 1, 0x7fc00000);
    dynamic_shared = memory.data();
    body = [&] { std::apply(kernel, values); };
    gridDim = grid;
    blockDim = {threads, 1, 1};
    for (blockIdx.z = 0; blockIdx.z < grid.z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) run_block(threads);
}
