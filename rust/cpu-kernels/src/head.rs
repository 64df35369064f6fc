//! A decoder's final norm and head: logits of some tokens, or each one's best token without its logits.

use crate::activations::Buffer;
use crate::decoder::{Decoder, need};
use crate::packed::{GROUP, Number, Packed};
use crate::pages::Element;
use crate::product::{Best, Kernel, Output, Product};
use crate::screen::Screen;
use crate::team::Team;
use crate::token_ops;

pub struct Head {
    norm: Vec<f32>,
    weight: Packed,
    kernel: Kernel,
    input: Buffer,
    screen: Option<Screen>,
}

/// Up to so many tokens the screen comes first: with more, hardly a group of columns is spared.
const SCREENED: usize = 64;
/// The same where the head itself is multiplied by AMX, at memory's speed.
const SCREENED_AMX: usize = 16;

impl Head {
    /// `weight` [vocabulary, hidden size] of what `kernel` multiplies, which need not be the layers' kernel.
    ///
    /// # Errors
    /// A message when they do not fit together.
    ///
    /// # Panics
    /// When this processor does not have the kernel's instructions.
    pub fn new(norm: Vec<f32>, weight: Packed, kernel: Kernel) -> Result<Self, String> {
        assert!(Kernel::available().contains(&kernel), "{kernel:?} does not run here");
        need(norm.len() == weight.k, || format!("the final norm must hold {} numbers", weight.k))?;
        need(kernel.multiplies(weight.number()), || {
            format!("the head is stored in {:?}, which {kernel:?} does not multiply", weight.number())
        })?;
        let input = Buffer::new(weight.k, kernel.takes());
        Ok(Self { norm, weight, kernel, input, screen: None })
    }

    /// Find best tokens through an int8 screen of `weight` [vocabulary, hidden size], from which this head was packed.
    ///
    /// # Errors
    /// A message when there is no memory or a weight is not finite.
    ///
    /// # Panics
    /// When the weights are of another size.
    pub fn screened<E: Element>(mut self, weight: &[E]) -> Result<Self, String> {
        assert_eq!(weight.len(), self.weight.columns * self.weight.k, "the head's own weights");
        self.screen = Some(Screen::new(weight, self.weight.k, self.weight.number() == Number::Bf16)?);
        Ok(self)
    }

    /// Bytes of its weights, the screen's copy included.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.weight.bytes() + self.screen.as_ref().map_or(0, Screen::bytes)
    }

    /// Norm some of `hidden`'s tokens as its input.
    fn pick(&mut self, team: &Team, hidden: &[f32], indices: &[i32], eps: f32) -> Result<(), String> {
        let size = self.weight.k;
        let tokens = hidden.len() / size;
        let bad = indices.iter().find(|&&i| i < 0 || i as usize >= tokens);
        need(bad.is_none(), || format!("token {} of {tokens}", bad.copied().unwrap_or_default()))?;
        self.input.fit(indices.len());
        let picked: Vec<f32> = indices.iter().flat_map(|&i| &hidden[i as usize * size..][..size]).copied().collect();
        token_ops::norm(team, &picked, &self.norm, eps, indices.len(), self.input.sink());
        Ok(())
    }
}

impl Decoder {
    /// # Errors
    /// A message when the head is not over the hidden size.
    pub fn set_head(&mut self, head: Head) -> Result<(), String> {
        need(head.weight.k == self.shape.hidden, || format!("the head must be over {} numbers", self.shape.hidden))?;
        self.head = Some(head);
        Ok(())
    }

    /// Logits [indices, vocabulary] of some of `hidden`'s tokens, as `forward` left them.
    ///
    /// # Errors
    /// A message when there is no head, an index has no token or `out` does not fit.
    pub fn logits(&mut self, team: &Team, hidden: &[f32], indices: &[i32], out: &mut [f32]) -> Result<(), String> {
        let Some(head) = &mut self.head else { return Err("the decoder has no head".into()) };
        let vocabulary = head.weight.columns;
        need(out.len() == indices.len() * vocabulary, || format!("logits must be [{}, {vocabulary}]", indices.len()))?;
        head.pick(team, hidden, indices, self.shape.eps)?;
        let output = Output::Store { at: out.as_mut_ptr(), stride: vocabulary };
        let product = Product { weight: &head.weight, input: head.input.rows(), rows: indices.len(), output };
        // SAFETY: `out` has a row an index, the buffer was made to fit.
        unsafe { product.run(head.kernel, team) };
        Ok(())
    }

    /// For some of `hidden`'s tokens the column of the largest logit among the first `limit`, the lowest among equals; -1
    /// where that logit is NaN or infinite. No logits are kept.
    ///
    /// # Errors
    /// As `logits`.
    pub fn best(
        &mut self,
        team: &Team,
        hidden: &[f32],
        indices: &[i32],
        limit: usize,
        out: &mut [i32],
    ) -> Result<(), String> {
        need(out.len() == indices.len(), || format!("{} results for {} tokens", out.len(), indices.len()))?;
        let Some(head) = &mut self.head else { return Err("the decoder has no head".into()) };
        head.pick(team, hidden, indices, self.shape.eps)?;
        let rows = indices.len();
        let groups = head.weight.num_panels().div_ceil(GROUP);
        let mut best = vec![Best::NONE; groups * rows];
        let output = Output::Best { at: best.as_mut_ptr(), rows, limit };
        let product = Product { weight: &head.weight, input: head.input.rows(), rows, output };
        let most = if head.kernel == Kernel::Amx { SCREENED_AMX } else { SCREENED };
        let screen = head.screen.as_mut().filter(|_| rows <= most);
        let groups = screen
            .and_then(|s| s.take(head.input.values(rows).chunks_exact(head.weight.k)).then(|| s.groups(team, limit)));
        // SAFETY: one result a group and row; the buffer was made to fit.
        unsafe {
            match groups {
                Some(groups) => product.run_groups(head.kernel, team, &groups),
                None => product.run(head.kernel, team),
            }
        }
        for (row, out) in out.iter_mut().enumerate() {
            let best = best[row..].iter().step_by(rows).fold(Best::NONE, |a, &b| a.or(b));
            *out = if best.value.is_finite() { best.column as i32 } else { -1 };
        }
        Ok(())
    }
}
