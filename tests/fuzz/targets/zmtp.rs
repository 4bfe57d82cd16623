//! Fuzzes the agent's side of ZeroMQ's wire protocol, over a real connection.
#![no_main]

use std::cell::LazyCell;

use libfuzzer_sys::fuzz_target;
use tokio::{io::AsyncWriteExt as _, net::TcpStream, runtime::Runtime};
use worker_agent::kv_events::zmtp::{Connection, SocketType};

thread_local! {
    static RUNTIME: LazyCell<Runtime> = LazyCell::new(|| {
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
    });
}

/// The greeting of a peer that speaks ZMTP 3.0 without authentication.
fn greeting() -> [u8; 64] {
    let mut greeting = [0; 64];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

fuzz_target!(|input: &[u8]| {
    let Some((&choice, frames)) = input.split_first() else { return };
    let kind = if choice & 1 == 1 { SocketType::Sub } else { SocketType::Dealer };
    RUNTIME.with(|runtime| {
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
            let addr = listener.local_addr().expect("an address");
            let mut peer = TcpStream::connect(addr).await.expect("a connection");
            let (stream, _) = listener.accept().await.expect("a connection");
            if choice & 2 == 0 {
                peer.write_all(&greeting()).await.expect("room for a greeting");
            }
            // Without a reset, the agent can read all of it before the end.
            peer.write_all(frames).await.expect("room for the frames");
            peer.shutdown().await.expect("open");
            let Ok(mut connection) = Connection::greet(stream, kind).await else { return };
            let mut bytes = 0;
            while let Ok(message) = connection.receive().await {
                bytes += message.iter().map(|frame| frame.len() + 1).sum::<usize>();
            }
            assert!(bytes <= frames.len(), "more bytes than were sent");
        });
    });
});
