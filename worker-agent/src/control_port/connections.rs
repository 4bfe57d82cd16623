//! Accepts the connections of the control port, with a TLS handshake if there are certificates.
//!
//! Tonic gets each connection after its handshake. Handshakes run side by side, so a silent peer
//! doesn't delay the routers.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use service::{
    tasks::Tasks,
    tls::server::{self as tls, ServerStream, ServerTls},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{Semaphore, mpsc},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;
use tracing::{debug, warn};

/// The maximum number of handshakes at the same time. A fleet's routers connect at once when an
/// agent starts, each with a few connections. Further connections are closed.
const HANDSHAKES_MAX: usize = 256;
/// The number of connections that wait for the server's task, which takes each at once.
const ACCEPTED_QUEUED_MAX: usize = 16;
/// Pause after a failed accept, for example when file descriptors ran out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Starts a task that accepts connections until `tasks` are cancelled.
pub(super) fn accept(
    listener: TcpListener,
    tls: Option<ServerTls>,
    tasks: &Tasks,
) -> ReceiverStream<io::Result<ControlConnection>> {
    let (sender, receiver) = mpsc::channel(ACCEPTED_QUEUED_MAX);
    let (token, connection_tasks) = (tasks.token(), tasks.clone());
    tasks.spawn(async move {
        tokio::select! {
            biased;
            () = token.cancelled() => {}
            () = accept_all(listener, tls, sender, connection_tasks) => {}
        }
    });
    ReceiverStream::new(receiver)
}

async fn accept_all(
    listener: TcpListener,
    tls: Option<ServerTls>,
    sender: mpsc::Sender<io::Result<ControlConnection>>,
    tasks: Tasks,
) {
    let permits = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _peer)) => stream,
            Err(error) => {
                warn!(%error, "accept failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(permit) = Arc::clone(&permits).try_acquire_owned() else { continue };
        let (tls, sender, token) = (tls.clone(), sender.clone(), tasks.token());
        tasks.spawn(async move {
            let _permit = permit;
            let handshake = async {
                stream.set_nodelay(true)?;
                tls::accept(tls.as_ref(), stream).await
            };
            let accepted = tokio::select! {
                biased;
                () = token.cancelled() => return,
                accepted = handshake => accepted,
            };
            match accepted {
                // The receiver is gone when the server has ended.
                Ok(stream) => drop(sender.send(Ok(ControlConnection(stream))).await),
                Err(error) => debug!(%error, "TLS handshake failed"),
            }
        });
    }
}

/// A connection of the control port.
#[derive(Debug)]
pub(super) struct ControlConnection(ServerStream<TcpStream>);

impl Connected for ControlConnection {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for ControlConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl AsyncWrite for ControlConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, buffer)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(context, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }
}
