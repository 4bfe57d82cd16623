//! Macros that export functions of the C interface, each with the machine's entry check.

/// Exports functions. The body follows the arguments: with `|machine|` for a call about the whole
/// system, with `|gpu|` for a call whose first argument is a device handle.
macro_rules! export {
    ($($name:ident($($arg:ident: $type:ty),*) |$machine:ident| $body:expr;)*) => {$(
        // SAFETY: the name is NVML's, and no other library in a process that loads this one has it.
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name($($arg: $type),*) -> u32 {
            $crate::machine::call(stringify!($name), |$machine| $body)
        }
    )*};
}

macro_rules! export_device {
    ($($name:ident($($arg:ident: $type:ty),*) |$gpu:ident| $body:expr;)*) => {$(
        // SAFETY: the name is NVML's, and no other library in a process that loads this one has it.
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name(device: usize, $($arg: $type),*) -> u32 {
            $crate::machine::device_call(stringify!($name), device, |$gpu| $body)
        }
    )*};
}

pub(crate) use {export, export_device};
