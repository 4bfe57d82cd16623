//! The C interface: pointers that callers pass, and NVML's return codes.
//!
//! All `unsafe` code of this package is in this file and in the exported symbols.

use std::ffi::c_char;

use nvml_wrapper_sys::bindings as sys;

/// The result of a call; an error is an NVML return code.
pub(crate) type Answer = Result<(), u32>;

pub(crate) const UNINITIALIZED: u32 = sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED;
pub(crate) const INVALID_ARGUMENT: u32 = sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT;
pub(crate) const NOT_SUPPORTED: u32 = sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED;
pub(crate) const NOT_FOUND: u32 = sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND;
pub(crate) const INSUFFICIENT_SIZE: u32 = sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE;
pub(crate) const TIMEOUT: u32 = sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT;
pub(crate) const GPU_IS_LOST: u32 = sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST;
pub(crate) const VERSION_MISMATCH: u32 = sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH;

/// A pointer to room for one or more `T`, with the layout of a plain pointer. Callers follow NVML's
/// header: the pointer is null, or valid for reads and writes of as much as the call says.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T: Copy> Out<T> {
    /// Writes one value; `INVALID_ARGUMENT` if the pointer is null.
    pub(crate) fn put(&self, value: T) -> Answer {
        if self.0.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: not null, so valid for a write of one value.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// Writes a reading; `NOT_SUPPORTED` if the device doesn't have it.
    pub(crate) fn put_some(&self, value: Option<T>) -> Answer {
        self.put(value.ok_or(NOT_SUPPORTED)?)
    }

    /// Reads the value that the caller passed in.
    pub(crate) fn get(&self) -> Result<T, u32> {
        if self.0.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: not null, so initialised by the caller, who passes a value in.
        Ok(unsafe { self.0.read() })
    }

    /// Returns the place of value `index`; the caller has declared more than `index` values.
    pub(crate) fn offset(&self, index: usize) -> Self {
        Self(self.0.wrapping_add(index))
    }
}

impl Out<c_char> {
    /// Writes a text with its final NUL; `INSUFFICIENT_SIZE` if `length` is too short.
    pub(crate) fn text(&self, length: u32, text: &str) -> Answer {
        if (length as usize) < text.len() + 1 {
            return Err(INSUFFICIENT_SIZE);
        }
        let mut bytes = text.bytes().chain([0]).enumerate();
        bytes.try_for_each(|(index, byte)| self.offset(index).put(byte.cast_signed()))
    }

    /// Reads a text passed in by the caller, of at most `bytes_max` bytes.
    pub(crate) fn read_text(&self, bytes_max: usize) -> Result<String, u32> {
        let mut text = String::new();
        for index in 0..bytes_max {
            match self.offset(index).get()?.cast_unsigned() {
                0 => return Ok(text),
                byte => text.push(char::from(byte)),
            }
        }
        Err(INVALID_ARGUMENT)
    }
}

/// Copies a text into a fixed field, truncated if necessary.
pub(crate) fn fill(field: &mut [c_char], text: &str) {
    let room = field.len().saturating_sub(1);
    for (place, byte) in field.iter_mut().zip(text.bytes().take(room).chain([0])) {
        *place = byte.cast_signed();
    }
}
