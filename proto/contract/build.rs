//! Generates the gRPC code from the schema with a pure-Rust compiler, so no `protoc` is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=schema");
    let descriptors = protox::compile(["agent/v1/agent.proto"], ["schema"])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
