//! Serves HTTP/1 with the limits that a port open to any client needs.
//!
//! An idle connection gives way to a new one. While all connections work, a reserve answers health
//! checks. A refusal gets the form of the API that its path belongs to. When the process stops,
//! connections finish their running requests. The size of bodies is limited in `budget`, and the
//! number of turns by the routes in `app`. With certificates, the port speaks TLS and nothing else.

mod connections;
mod drain;
mod local_port;
mod metrics;
mod port;
mod port_limits;
mod read_ahead;
mod request_id;
mod settings;
mod unread;

use std::{
    any::Any,
    convert::Infallible,
    future::Future,
    net::{SocketAddr, TcpListener as StdListener},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    body::Body,
    response::{IntoResponse as _, Response},
};
use http::{HeaderValue, Method, Request, header};
use hyper::{
    server::conn::http1,
    service::{Service as _, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::{
    net::{TcpListener, TcpStream},
    time::Sleep,
};
use tokio_io_timeout::TimeoutStream;
use tower_service::Service;
use tracing::{debug, warn};

use self::{
    connections::Place,
    drain::DrainRate,
    metrics::CloseReason,
    port::{ConnectionRef, OpenConnection, Port, RequestGuard},
    port_limits::ADMIN_CONNECTIONS_MAX,
    read_ahead::{CurrentAnswer, ReadAheadBody},
    unread::{DrainedIo, RequestBody, Requests, Watched},
};
pub use self::{
    local_port::{LocalAnswer, LocalPort, LocalPorts, OpenPort},
    metrics::Metrics,
    port::PeerAddress,
    port_limits::{HEALTH_PATHS, PortLimits},
    read_ahead::AnswerBuffers,
    settings::ConnectionSettings,
};
use crate::{
    refusal::{Api, Code, Refusal},
    tasks::Tasks,
    tls::server::{self as tls, ServerStream, ServerTls},
};

/// Number of descriptors to keep for the admin port and for the reserves of both ports.
pub const DESCRIPTORS_RESERVED: usize = ADMIN_CONNECTIONS_MAX + 2 * connections::RESERVE_PLACES;
/// Time within which a new client must send its first request's header. On later requests of the
/// connection, the header must arrive within the time that the connection may be idle.
const HEADER_TIME_MAX: Duration = Duration::from_secs(10);
/// A client that reads nothing of its answer occupies memory, and perhaps a turn that may run.
const WRITE_STALL_TIME_MAX: Duration = Duration::from_secs(60);
/// Pause after a failed accept, for example when file descriptors ran out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const LISTEN_BACKLOG: i32 = 1024;
/// For the rest of an evicted connection's last answer.
const EVICTED_TIME_MAX: Duration = Duration::from_secs(1);
/// How often to look whether a running request's client has gone although bytes of a next one wait.
const CLIENT_LOOK_INTERVAL: Duration = Duration::from_secs(1);
const DRAIN_CHECK_INTERVAL: Duration = Duration::from_secs(1);

pub fn bind(addr: SocketAddr) -> std::io::Result<StdListener> {
    let domain = socket2::Domain::for_address(addr);
    let socket = socket2::Socket::new(domain, socket2::Type::STREAM, None)?;
    // A restarted process must not wait until old connections have left the system's tables.
    socket.set_reuse_address(true)?;
    socket.bind(&addr.into())?;
    socket.listen(LISTEN_BACKLOG)?;
    Ok(socket.into())
}

/// What an answer holds until its body has ended, such as a share: an extension of the response.
#[derive(Debug, Clone)]
pub struct HeldByAnswer {
    _held: Arc<dyn Any + Send + Sync>,
}

impl HeldByAnswer {
    pub fn new(held: impl Any + Send + Sync) -> Self {
        Self { _held: Arc::new(held) }
    }
}

/// What answers the requests of a port, such as an axum router.
pub trait App:
    Service<Request<Body>, Response = Response, Error = Infallible, Future: Send>
    + Clone
    + Send
    + 'static
{
}

impl<A> App for A where
    A: Service<Request<Body>, Response = Response, Error = Infallible, Future: Send>
        + Clone
        + Send
        + 'static
{
}

/// A connection takes about 40 KiB while it reads, and with `tls` 40 KiB more.
pub async fn serve(
    listener: TcpListener,
    app: impl App,
    limits: PortLimits,
    tls: Option<ServerTls>,
    tasks: Tasks,
) {
    let port = Arc::new(Port::new(limits, tasks.leave_token()));
    let stop_token = tasks.token();
    loop {
        let accepted = tokio::select! {
            biased;
            () = stop_token.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let (stream, peer_addr) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!(%error, port = port.limits.name, "accept failed");
                // If descriptors ran out, an idle connection has one to give.
                port.evict_longest_idle();
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        port.let_idle_connections_ask(peer_addr).await;
        // Without a place, dropping the stream closes the connection.
        let Some(mut connection) = port.open(peer_addr) else { continue };
        let (app, tls, stop_token) = (app.clone(), tls.clone(), stop_token.clone());
        tasks.spawn(async move {
            // An answer is streamed in small writes, one per token. Without `nodelay`, TCP would
            // hold each write back until the client has acknowledged the previous write.
            let Ok(()) = stream.set_nodelay(true) else { return };
            let mut stream = TimeoutStream::new(stream);
            stream.set_write_timeout(Some(WRITE_STALL_TIME_MAX));
            let accepted = tokio::select! {
                biased;
                Ok(()) = &mut connection.evicted => return,
                () = stop_token.cancelled() => return,
                accepted = tls::accept(tls.as_ref(), Box::pin(stream)) => accepted,
            };
            let stream = match accepted {
                Ok(stream) => stream,
                Err(error) => {
                    let limits = &connection.shared.port.limits;
                    limits.metrics.count_failed_handshake(limits.name, &error);
                    return debug!(%error, port = limits.name, "TLS handshake failed");
                }
            };
            serve_stream(stream, app, connection, stop_token.cancelled_owned()).await;
        });
    }
}

fn is_client_gone(stream: &ServerStream<Pin<Box<TimeoutStream<TcpStream>>>>) -> bool {
    let socket = stream.get_ref().get_ref();
    let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
    // The system reports these without being asked for them.
    let is_gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    poll(&mut fds, Some(&Timespec::default())).is_ok() && fds[0].revents().intersects(is_gone)
}

/// Why the server stops serving a connection before the connection's own end.
enum Interruption {
    Stop,
    Evicted,
    HeaderLate,
}

async fn serve_stream(
    stream: ServerStream<Pin<Box<TimeoutStream<TcpStream>>>>,
    app: impl App,
    connection: OpenConnection,
    stop: impl Future<Output = ()>,
) {
    let OpenConnection { shared, peer, evicted } = connection;
    let limits = &shared.port.limits;
    let current_answer = Arc::new(CurrentAnswer::default());
    let has_request = Arc::new(AtomicBool::new(false));
    let open_requests = Requests::default();
    let handler = RequestHandler {
        app: TowerToHyperService::new(app),
        peer,
        connection: Arc::clone(&shared),
        current_answer: Arc::clone(&current_answer),
        has_request: Arc::clone(&has_request),
        open_requests: open_requests.clone(),
    };
    let http = http1::Builder::new()
        .timer(TokioTimer::new())
        // Hyper counts the time from the end of the previous answer.
        .header_read_timeout(limits.keep_alive)
        .max_headers(limits.headers_max)
        .max_buf_size(limits.header_bytes_max)
        .serve_connection(
            TokioIo::new(DrainedIo::new(stream, is_client_gone, open_requests.clone())),
            Watched::new(service_fn(move |request| handler.serve(request)), open_requests.clone()),
        );
    let mut http = std::pin::pin!(http);
    let mut driver = Driver::new(current_answer, limits.drain_rate, open_requests.clone());
    let interruption = {
        let header_late = tokio::time::sleep(HEADER_TIME_MAX);
        let (mut header_late, mut stop) = (std::pin::pin!(header_late), std::pin::pin!(stop));
        let mut ended = std::pin::pin!(driver.run(http.as_mut()));
        let mut evicted = std::pin::pin!(evicted);
        loop {
            let has_first_request = has_request.load(Ordering::Relaxed);
            tokio::select! {
                biased;
                ended = &mut ended => return report_end(limits, ended),
                Ok(()) = &mut evicted => break Interruption::Evicted,
                () = &mut stop => break Interruption::Stop,
                () = &mut header_late, if !has_first_request => {
                    // The request may have come after the flag was read.
                    if !has_request.load(Ordering::Relaxed) {
                        break Interruption::HeaderLate;
                    }
                }
            }
        }
    };
    match interruption {
        Interruption::HeaderLate => {
            limits.metrics.count_closed(limits.name, CloseReason::HeaderLate);
        }
        Interruption::Evicted => {
            open_requests.stop();
            http.as_mut().graceful_shutdown();
            // On timeout, the rest of the last answer is lost: its client doesn't read it.
            let _ = tokio::time::timeout(EVICTED_TIME_MAX, driver.run(http)).await;
        }
        Interruption::Stop => {
            open_requests.stop();
            http.as_mut().graceful_shutdown();
            report_end(limits, driver.run(http).await);
        }
    }
}

fn report_end(limits: &PortLimits, ended: Result<(), ConnectionEnd>) {
    match ended {
        Ok(()) => {}
        Err(ConnectionEnd::Http(error)) => debug!(%error, "connection ended early"),
        Err(ConnectionEnd::SlowReader) => {
            limits.metrics.count_closed(limits.name, CloseReason::SlowReader);
            debug!(port = limits.name, "a client read its answer too slowly");
        }
    }
}

/// Why a connection ended before its client closed it.
enum ConnectionEnd {
    Http(hyper::Error),
    SlowReader,
}

struct Driver {
    current_answer: Arc<CurrentAnswer>,
    drain_rate: DrainRate,
    /// When the client's speed is checked next. `None` while the client keeps up.
    check: Option<Pin<Box<Sleep>>>,
    open_requests: Requests,
    /// When the next look is whether the client has gone. `None` if no request ran at the last one.
    client_look: Option<Pin<Box<Sleep>>>,
}

impl Driver {
    fn new(
        current_answer: Arc<CurrentAnswer>,
        drain_rate: DrainRate,
        open_requests: Requests,
    ) -> Self {
        Self { current_answer, drain_rate, check: None, open_requests, client_look: None }
    }

    /// Has hyper's next flush look whether the client has gone, every second while a request runs.
    fn look_for_client(&mut self, context: &mut Context<'_>) {
        if let Some(look) = &mut self.client_look {
            if look.as_mut().poll(context).is_pending() {
                return;
            }
            self.client_look = None;
            if self.open_requests.is_any_open() {
                self.open_requests.look_for_client();
            }
        }
        if self.open_requests.is_any_open() {
            let mut look = Box::pin(tokio::time::sleep(CLIENT_LOOK_INTERVAL));
            if look.as_mut().poll(context).is_pending() {
                self.client_look = Some(look);
            }
        }
    }

    async fn run<F>(&mut self, mut http: Pin<&mut F>) -> Result<(), ConnectionEnd>
    where
        F: Future<Output = Result<(), hyper::Error>>,
    {
        std::future::poll_fn(|context| {
            if let Some(answer) = self.current_answer.get() {
                answer.clear_awaited();
            }
            self.look_for_client(context);
            if let Poll::Ready(ended) = http.as_mut().poll(context) {
                return Poll::Ready(ended.map_err(ConnectionEnd::Http));
            }
            self.look_for_client(context);
            let Some(answer) = self.current_answer.get() else {
                self.check = None;
                return Poll::Pending;
            };
            if !answer.read_ahead(context) {
                self.check = None;
                return Poll::Pending;
            }
            loop {
                let new_check = || Box::pin(tokio::time::sleep(DRAIN_CHECK_INTERVAL));
                let check = self.check.get_or_insert_with(new_check);
                ready!(check.as_mut().poll(context));
                self.check = None;
                if answer.is_too_slow(self.drain_rate) {
                    return Poll::Ready(Err(ConnectionEnd::SlowReader));
                }
            }
        })
        .await
    }
}

struct RequestHandler<A> {
    app: TowerToHyperService<A>,
    peer: PeerAddress,
    connection: Arc<ConnectionRef>,
    current_answer: Arc<CurrentAnswer>,
    has_request: Arc<AtomicBool>,
    open_requests: Requests,
}

impl<A: App> RequestHandler<A> {
    fn serve(
        &self,
        mut request: http::Request<RequestBody>,
    ) -> impl Future<Output = Result<http::Response<ReadAheadBody>, Infallible>> + use<A> {
        self.has_request.store(true, Ordering::Relaxed);
        let begun = RequestGuard::new(&self.connection, self.peer);
        let limits = &self.connection.port.limits;
        let is_usual = matches!(begun, Some((_, Place::Usual)));
        let mut guard = begun.map(|(guard, _)| guard);
        let is_served = is_usual || limits.health_paths.contains(&request.uri().path());
        // Hyper sends an answer to HEAD without its body, whatever the service returns. A control
        // call acts, so it isn't made by a look at it.
        let acts = contract::control::ControlRoute::for_path(request.uri().path()).is_some();
        if request.method() == Method::HEAD && !acts {
            *request.method_mut() = Method::GET;
        }
        request.extensions_mut().insert(self.peer);
        let request_id = request_id::identify(request.headers_mut());
        let api = Api::for_request(request.uri().path(), request.headers());
        let answer = if guard.is_some() && is_served {
            Ok(self.app.call(request.map(Body::new)))
        } else {
            limits.metrics.count_closed(limits.name, CloseReason::Full);
            Err(full_refusal())
        };
        let (buffers, current_answer) = (limits.buffers.clone(), Arc::clone(&self.current_answer));
        let leaves = self.connection.port.leaves.clone();
        let open_requests = self.open_requests.clone();
        async move {
            let mut response = match answer {
                Ok(answer) => answer.await?,
                Err(refusal) => refusal.into_response(),
            };
            let held = response.extensions_mut().remove::<HeldByAnswer>();
            response = answer_in_form(response, api, request_id);
            if guard.is_none() || !is_usual || leaves.is_cancelled() {
                let close = HeaderValue::from_static("close");
                response.headers_mut().insert(header::CONNECTION, close);
            }
            // An answer that comes before the body is there whole: no place is needed any more.
            guard = guard.filter(|_| !open_requests.is_body_unread());
            let held = (guard, held);
            Ok(response.map(|body| ReadAheadBody::new(body, buffers, &current_answer, held)))
        }
    }
}

/// Writes a refusal in the form of `api`, and names the request.
fn answer_in_form(mut response: Response, api: Api, request_id: HeaderValue) -> Response {
    if let Some(refusal) = response.extensions_mut().remove::<Refusal>() {
        let id = request_id.to_str().unwrap_or_default();
        debug!(request_id = id, code = refusal.code.as_str(), "request refused");
        *response.body_mut() = Body::from(api.body(&refusal, id));
        // The length was that of the body before.
        response.headers_mut().remove(header::CONTENT_LENGTH);
    }
    request_id::add(response.headers_mut(), request_id);
    response
}

fn full_refusal() -> Refusal {
    Refusal::new(
        Code::ConnectionsFull,
        "this server has as many connections as it may have, or your address has; close some, or \
         try again",
    )
}

#[cfg(test)]
mod tests;
