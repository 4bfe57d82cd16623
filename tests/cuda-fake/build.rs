//! Builds the kernels as host code, and names the library as the driver's is named.

use std::path::Path;

fn main() {
    let host = Path::new("../../kernels/cuda/host");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .file(host.join("launch.cpp"))
        .define("KV_SOURCE", "\"../kv_account.cu\"")
        // The emulation jumps between stacks, which a fortified libc takes for a fault.
        .flag("-U_FORTIFY_SOURCE")
        .opt_level(2)
        .compile("kv_host");
    for source in ["host/launch.cpp", "host/emulate.h", "kv_account.cu"] {
        println!("cargo:rerun-if-changed=../../kernels/cuda/{source}");
    }
    // Whoever asks for the driver by its first name gets this one, if it is loaded already.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
}
