//! Keeps a connection to a store of the operator's.
//!
//! Claims never wait for a connection. A task makes one ahead of them. Until it has the next one,
//! claims use the old one: a store that is slow to make another may still answer on it.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwapOption;
use service::{backoff::Backoff, tasks::Tasks};
use tokio::sync::Notify;
use tonic::async_trait;

use super::store::Error;

/// Includes all that a store asks for before it takes claims.
pub(super) const CONNECT_TIME_MAX: Duration = Duration::from_secs(2);
/// How long a connection is kept at least. A store that is only slow fails claims on every
/// connection, and making more would keep it busy.
const AGE_MIN: Duration = Duration::from_secs(1);

#[async_trait]
pub(super) trait Connect: Send {
    type Connection: Send + Sync;

    async fn connect(&self, url: &str) -> Result<Self::Connection, Error>;
}

#[derive(Debug)]
pub(super) struct Current<C> {
    connection: ArcSwapOption<C>,
    is_broken: Notify,
}

impl<C> Default for Current<C> {
    fn default() -> Self {
        Self { connection: ArcSwapOption::empty(), is_broken: Notify::new() }
    }
}

impl<C> Current<C> {
    pub(super) fn get(&self) -> Result<Arc<C>, Error> {
        self.connection.load_full().ok_or(Error::NotConnected)
    }

    pub(super) fn report_failure(&self) {
        self.is_broken.notify_one();
    }
}

/// Asks the servers in turn, after each failure the next. A connection gets a successor after
/// `age_max`, or soon after a failure.
pub(super) async fn keep_connected<M: Connect>(
    maker: M,
    current: Arc<Current<M::Connection>>,
    urls: Vec<String>,
    age_max: Duration,
) {
    let (mut urls, mut backoff) = (urls.iter().cycle(), Backoff::default());
    let Some(mut url) = urls.next() else { return };
    loop {
        let made = tokio::time::timeout(CONNECT_TIME_MAX, maker.connect(url)).await;
        match made.unwrap_or(Err(Error::Late(CONNECT_TIME_MAX))) {
            Ok(connection) => {
                current.connection.store(Some(Arc::new(connection)));
                backoff.reset();
                tokio::time::sleep(AGE_MIN).await;
                let failure = current.is_broken.notified();
                let _ = tokio::time::timeout(age_max.saturating_sub(AGE_MIN), failure).await;
            }
            Err(error) => {
                tracing::debug!(url, %error, "no connection to the claim store");
                url = urls.next().expect("a cycle has no end");
                backoff.pause().await;
            }
        }
    }
}

pub(super) fn spawn_until_stopped(tasks: &Tasks, work: impl Future<Output = ()> + Send + 'static) {
    let token = tasks.token();
    tasks.spawn(async move {
        token.run_until_cancelled(work).await;
    });
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

    use super::*;

    const AGE_MAX: Duration = Duration::from_secs(15);

    /// Servers that answer or refuse. A connection is the server's URL and its number.
    #[derive(Default)]
    struct Servers {
        refuse: AtomicBool,
        made: AtomicU32,
        asked: parking_lot::Mutex<Vec<String>>,
    }

    #[async_trait]
    impl Connect for Arc<Servers> {
        type Connection = u32;

        async fn connect(&self, url: &str) -> Result<u32, Error> {
            self.asked.lock().push(url.to_owned());
            if self.refuse.load(Relaxed) {
                // A server that is stopped accepts connections, and answers nothing.
                std::future::pending::<()>().await;
            }
            Ok(self.made.fetch_add(1, Relaxed) + 1)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_kept_until_there_is_another() {
        let (servers, current) = (Arc::<Servers>::default(), Arc::<Current<u32>>::default());
        assert!(current.get().is_err());
        let urls = ["a", "b"].map(str::to_owned).to_vec();
        let keep = keep_connected(Arc::clone(&servers), Arc::clone(&current), urls, AGE_MAX);
        let follow = async {
            tokio::time::sleep(Duration::from_millis(1)).await;
            assert_eq!(*current.get().unwrap(), 1);
            tokio::time::sleep(AGE_MAX).await;
            assert_eq!(*current.get().unwrap(), 2, "the first got old");
            servers.refuse.store(true, Relaxed);
            current.report_failure();
            tokio::time::sleep(Duration::from_secs(60)).await;
            assert_eq!(*current.get().unwrap(), 2, "it may still work");
            let asked = servers.asked.lock().split_off(2);
            assert!(asked.len() > 4, "{asked:?}");
            assert_eq!(asked[..4], ["a", "b", "a", "b"], "after each failure the next");
            servers.refuse.store(false, Relaxed);
            tokio::time::sleep(Duration::from_secs(6)).await;
            assert_eq!(*current.get().unwrap(), 3);
        };
        tokio::select! {
            () = keep => unreachable!("it goes on forever"),
            () = follow => {}
        }
    }

    #[tokio::test(start_paused = true)]
    async fn failures_of_a_slow_store_make_few_connections() {
        let (servers, current) = (Arc::<Servers>::default(), Arc::<Current<u32>>::default());
        let urls = vec!["a".to_owned()];
        let keep = keep_connected(Arc::clone(&servers), Arc::clone(&current), urls, AGE_MAX);
        let fail = async {
            for _ in 0..1000 {
                current.report_failure();
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            () = keep => unreachable!("it goes on forever"),
            () = fail => {}
        }
        let made = servers.made.load(Relaxed);
        assert!((4..=6).contains(&made), "{made} connections in 5 s");
    }
}
