//! Generates the client of etcd from its schema, with a compiler in Rust: no `protoc` is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=schema");
    let descriptors = protox::compile(["etcd/rpc.proto"], ["schema"])?;
    tonic_prost_build::configure().build_server(false).compile_fds(descriptors)?;
    Ok(())
}
