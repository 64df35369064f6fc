//! What a call can refuse. Refusing changes nothing: every check runs before the first mutation.

use std::fmt;

/// Why a call was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// An argument is wrong; the message names it, what was expected and what was given.
    Argument(String),
    /// The books do not balance; the message says which invariant is broken.
    Integrity(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Argument(message) | Self::Integrity(message) => f.write_str(message),
        }
    }
}

impl std::error::Error for Error {}

/// Shorthand used throughout the crate.
pub type Result<T> = std::result::Result<T, Error>;

/// `Err(Error::Argument(message))` unless `ok`.
pub(crate) fn ensure(ok: bool, message: impl FnOnce() -> String) -> Result<()> {
    if ok { Ok(()) } else { Err(Error::Argument(message())) }
}
