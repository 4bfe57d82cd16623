//! Generates the gRPC code of the contract's earlier version, for the tests of mixed versions.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=data/schema-0.1");
    let descriptors = protox::compile(["agent/v1/agent.proto"], ["data/schema-0.1"])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
