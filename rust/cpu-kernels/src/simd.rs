//! Which vector and matrix instructions this processor has, and whether the system lets this process use them.

/// AVX2 with fused multiply-add (x86-64-v3).
#[must_use]
pub fn has_avx2() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// AVX-512 as every server since 2017 has it (F, BW, DQ, VL: x86-64-v4), and what `has_avx2` says.
#[must_use]
pub fn has_avx512() -> bool {
    #[cfg(target_arch = "x86_64")]
    return has_avx2()
        && std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("avx512bw")
        && std::arch::is_x86_feature_detected!("avx512dq")
        && std::arch::is_x86_feature_detected!("avx512vl");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// `has_avx512`, and its conversions and dot products of bfloat16.
#[must_use]
pub fn has_avx512_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    return has_avx512() && std::arch::is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// `has_avx512`, and its dot products of int8 (VNNI).
#[must_use]
pub fn has_avx512_vnni() -> bool {
    #[cfg(target_arch = "x86_64")]
    return has_avx512() && std::arch::is_x86_feature_detected!("avx512vnni");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// `amx_ready`, and products of int8.
#[must_use]
pub fn amx_int8_ready() -> bool {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    return amx_ready() && amx::multiplies_int8();
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    false
}

/// AMX tiles with products of bfloat16, `has_avx512_bf16`, and the system's permission, which the first call asks for
/// the whole process (Linux keeps the 8 kB of tiles out of a thread's state until then).
#[must_use]
pub fn amx_ready() -> bool {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    {
        static READY: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
        *READY.get_or_init(|| has_avx512_bf16() && amx::in_processor() && amx::permitted())
    }
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    false
}

/// Ask for huge pages under `bytes` from `at` on: a wish, whatever comes of it.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub fn want_huge_pages(at: *const u8, bytes: usize) {
    const MADVISE: i64 = 28;
    const MADV_HUGEPAGE: i64 = 14;
    const PAGE: usize = 4096;
    let start = (at as usize).next_multiple_of(PAGE);
    let end = (at as usize + bytes) / PAGE * PAGE;
    if end > start {
        let _ = amx::call(MADVISE, [start as i64, (end - start) as i64, MADV_HUGEPAGE]);
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx {
    use std::arch::x86_64::{__cpuid, __cpuid_count};

    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XFEATURE_XTILEDATA: i64 = 18;

    /// Tiles and their bfloat16 product, and eight tiles of 16 rows of 64 bytes (palette 1).
    pub fn in_processor() -> bool {
        if __cpuid(0).eax < 0x1D {
            return false;
        }
        let features = __cpuid_count(7, 0).edx;
        let (bf16, tile) = (features >> 22 & 1 == 1, features >> 24 & 1 == 1);
        if !(bf16 && tile) || __cpuid_count(0x1D, 0).eax < 1 {
            return false;
        }
        let palette = __cpuid_count(0x1D, 1);
        let (tile_bytes, row_bytes) = (palette.eax >> 16, palette.ebx & 0xFFFF);
        let (names, rows) = (palette.ebx >> 16, palette.ecx & 0xFFFF);
        tile_bytes >= 1024 && row_bytes >= 64 && names >= 8 && rows >= 16
    }

    /// Products of int8, where `in_processor`.
    pub fn multiplies_int8() -> bool {
        __cpuid_count(7, 0).edx >> 25 & 1 == 1
    }

    /// Ask for tile data; an older kernel answers with an error, and so does one that keeps tiles for itself.
    pub fn permitted() -> bool {
        call(ARCH_PRCTL, [ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA, 0]) == 0
    }

    /// A system call that reads its numbers and changes no memory of ours (only what a page costs).
    pub fn call(number: i64, arguments: [i64; 3]) -> i64 {
        let mut result = number;
        // SAFETY: the calls made here (see above) write to no memory; the instruction clobbers rcx and r11.
        unsafe {
            std::arch::asm!(
                "syscall",
                inlateout("rax") result,
                in("rdi") arguments[0],
                in("rsi") arguments[1],
                in("rdx") arguments[2],
                lateout("rcx") _,
                lateout("r11") _,
                options(nostack),
            );
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_set_contains_the_one_below() {
        assert!(!amx_ready() || has_avx512_bf16());
        assert!(!has_avx512_bf16() || has_avx512());
        assert!(!has_avx512() || has_avx2());
        assert_eq!(amx_ready(), amx_ready());
    }

    /// What the kernel lists is what we find: the flags are read from the processor in two different ways.
    #[test]
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    fn agrees_with_the_system() {
        let Ok(text) = std::fs::read_to_string("/proc/cpuinfo") else { return };
        let Some(flags) = text.lines().find(|l| l.starts_with("flags")) else { return };
        let has = |name: &str| flags.split_whitespace().any(|f| f == name);
        assert_eq!(has_avx512(), ["avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"].iter().all(|n| has(n)));
        assert_eq!(has_avx512_bf16(), has_avx512() && has("avx512_bf16"));
        assert!(!amx_ready() || (has("amx_tile") && has("amx_bf16")));
        assert_eq!(has_avx512_vnni(), has_avx512() && has("avx512_vnni"));
        assert_eq!(amx_int8_ready(), amx_ready() && has("amx_int8"));
    }
}
