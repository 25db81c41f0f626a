// Instructions that CUDA C++ without its headers has no name for.

typedef unsigned int u32;
typedef unsigned short u16;

__device__ __forceinline__ float from_float16(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

// Two numbers rounded to nearest even in one word, the first in its lower half.
__device__ __forceinline__ u32 to_float16s(float first, float second) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(first), "f"(second));
    return word;
}
__device__ __forceinline__ u32 to_bfloat16s(float first, float second) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(first), "f"(second));
    return word;
}

// sum [16, 8] += a [16, 8] · b [8, 8] by the threads of a warp, in tf32: of a and b the lower 13 bits are left out. With
// g = lane / 4 and t = lane % 4 a thread has sum (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1);
// a (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4); b (t, g), (t + 4, g).
__device__ __forceinline__ void multiply(float *sum, const u32 *a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
