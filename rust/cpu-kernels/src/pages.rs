//! Where a layer's keys and values are in the one allocation that all layers and both tenants share.

/// A stored number: float32, or bfloat16 as its bits.
pub trait Element: Copy + Send + Sync + 'static {
    fn to_f32(self) -> f32;
    fn from_f32(value: f32) -> Self;
}

impl Element for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Element for u16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self) << 16)
    }
    /// Round to nearest even, as torch does; NaN stays NaN.
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        if value.is_nan() {
            return (bits >> 16) as u16 | 0x40;
        }
        ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
    }
}

/// One layer's view of the pages: key (and value) of token `t` of page `p` begin at
/// `p * page_stride + offset + t * kv_heads * head_dim`, all in elements.
#[derive(Clone, Copy, Debug)]
pub struct LayerPages {
    pub key_offset: usize,
    pub value_offset: usize,
    pub page_stride: usize,
    pub block_size: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl LayerPages {
    /// Elements from one token to the next within a page.
    #[must_use]
    pub fn token_stride(&self) -> usize {
        self.kv_heads.saturating_mul(self.head_dim)
    }

    /// How many pages of this layer lie within `len` elements.
    #[must_use]
    pub fn pages_within(&self, len: usize) -> usize {
        let used = (self.block_size.checked_mul(self.token_stride()))
            .and_then(|size| size.checked_add(self.key_offset.max(self.value_offset)))
            .unwrap_or(usize::MAX);
        if self.block_size == 0 || self.page_stride == 0 || used > self.page_stride || used > len {
            return 0;
        }
        (len - used) / self.page_stride + 1
    }
}

/// Store `key`, `value` [tokens, `kv_heads`, `head_dim`] at `slots` (page * `block_size` + offset; negative: nowhere).
///
/// # Errors
/// A message when a slot lies outside the pages or a length does not fit; nothing is written then.
pub fn write<E: Element>(
    storage: &mut [E],
    pages: &LayerPages,
    key: &[E],
    value: &[E],
    slots: &[i32],
) -> Result<(), String> {
    let width = pages.token_stride();
    if key.len() < slots.len() * width || value.len() < slots.len() * width {
        return Err(format!("{} slots need {} keys and values", slots.len(), slots.len() * width));
    }
    let limit = (pages.pages_within(storage.len()) * pages.block_size) as i64;
    if let Some(slot) = slots.iter().find(|&&s| i64::from(s) >= limit) {
        return Err(format!("slot {slot} is outside the pages, which hold {limit} tokens"));
    }
    for (i, &slot) in slots.iter().enumerate() {
        if slot < 0 {
            continue;
        }
        let slot = slot as usize;
        let at = slot / pages.block_size * pages.page_stride + slot % pages.block_size * width;
        storage[at + pages.key_offset..][..width].copy_from_slice(&key[i * width..][..width]);
        storage[at + pages.value_offset..][..width].copy_from_slice(&value[i * width..][..width]);
    }
    Ok(())
}
