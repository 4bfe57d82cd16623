//! `berth-pressure`: see the library.

fn main() -> std::process::ExitCode {
    pressure::main()
}
