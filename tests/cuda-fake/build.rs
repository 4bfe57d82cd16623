//! Builds the kernels as host code, and gives the library the driver's soname.

use std::path::Path;

fn main() {
    let host = Path::new("../../kernels/cuda/host");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .file(host.join("launch.cpp"))
        .define("KV_SOURCE", "\"../kv_account.cu\"")
        // The emulation jumps between stacks, which a fortified libc reports as an error.
        .flag("-U_FORTIFY_SOURCE")
        .opt_level(2)
        .compile("kv_host");
    for source in ["host/launch.cpp", "host/emulate.h", "kv_account.cu"] {
        println!("cargo:rerun-if-changed=../../kernels/cuda/{source}");
    }
    // With this soname, a program that opens the driver gets this library if it is already loaded.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
}
