//! An agent as a process of its own, which a test can signal, kill and start again.

use std::{
    io::{BufRead as _, BufReader},
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
};

use rustix::process::{Pid, Resource, Rlimit, Signal};

use engine_sim::loopback::own_addr;

/// What all agent processes of a test have in common: they serve one engine, at the same addresses,
/// with the same files.
#[derive(Debug)]
pub struct AgentPlace {
    /// The address for turns.
    pub data: SocketAddr,
    /// The address for routers.
    pub control: SocketAddr,
    /// The address of metrics and health.
    pub admin: SocketAddr,
    /// The folder of the journal and of the shim's socket.
    pub state: PathBuf,
    binary: &'static str,
    engine: String,
    folder: tempfile::TempDir,
}

/// A running agent process; killed when dropped.
#[derive(Debug)]
pub struct SpawnedAgent(Child);

impl AgentPlace {
    /// Returns a place with free addresses, for the agent `binary` beside `engine`.
    ///
    /// # Errors
    /// Fails if no port or folder can be had.
    pub fn new(binary: &'static str, engine: &str) -> anyhow::Result<Self> {
        let addr = own_addr();
        let free: Vec<TcpListener> =
            (0..3).map(|_| TcpListener::bind(addr)).collect::<Result<_, _>>()?;
        let [data, control, admin] = [0, 1, 2].map(|index: usize| free[index].local_addr());
        let folder = tempfile::tempdir()?;
        let state = folder.path().join("state");
        let engine = engine.to_owned();
        Ok(Self { data: data?, control: control?, admin: admin?, state, binary, engine, folder })
    }

    /// Starts an agent with these settings, which are lines of TOML, and flags. Returns when it has
    /// bound its addresses.
    ///
    /// # Errors
    /// Fails if the process ends instead; the error has its log.
    pub fn start(&self, settings: &str, flags: &[&str]) -> anyhow::Result<SpawnedAgent> {
        let mut agent = self.spawn(settings, flags)?;
        let mut lines = agent.log_lines();
        let mut said = vec![];
        for line in lines.by_ref() {
            let has_started = line.contains("agent starting");
            said.push(line);
            if has_started {
                // The rest must be read too, or the agent could not write it.
                std::thread::spawn(move || lines.for_each(drop));
                return Ok(agent);
            }
        }
        anyhow::bail!("the agent did not start: {}", said.join("\n"))
    }

    /// Starts an agent that must end by itself, and returns its log.
    ///
    /// # Errors
    /// Fails if the process can't be started.
    pub fn start_in_vain(&self) -> anyhow::Result<String> {
        let mut agent = self.spawn("", &[])?;
        Ok(agent.log_lines().collect::<Vec<_>>().join("\n"))
    }

    fn spawn(&self, settings: &str, flags: &[&str]) -> anyhow::Result<SpawnedAgent> {
        let file = self.folder.path().join("agent.toml");
        let common = format!(
            "[files]\nstate_dir = {:?}\n[gpu]\nnvml_library = \"no-nvml\"\n[reports]\n\
             interval_ms = 100\n[engine]\nvocabulary = 320\nload_interval_ms = 50\n",
            self.state
        );
        std::fs::write(&file, format!("{common}{settings}"))?;
        // A write over the limit of a file's size then fails, as on a full disk.
        let mut command = Command::new("bash");
        command.args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\"", self.binary]);
        command.arg("--config").arg(&file).args(["--engine", &self.engine, "--worker-id", "w0"]);
        let addrs = [
            ("--data-addr", self.data),
            ("--control-addr", self.control),
            ("--admin-addr", self.admin),
        ];
        for (flag, addr) in addrs {
            command.args([flag, &addr.to_string()]);
        }
        Ok(SpawnedAgent(command.args(flags).stderr(Stdio::piped()).spawn()?))
    }

    /// Returns the URL of a data route.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.data)
    }

    /// Returns the journal's file.
    #[must_use]
    pub fn journal(&self) -> PathBuf {
        let port = self.engine.rsplit(':').next().unwrap_or_default();
        self.state.join(format!("engine-{port}.journal"))
    }

    /// Returns the socket on which the agent listens for the shim.
    #[must_use]
    pub fn shim_socket(&self) -> PathBuf {
        self.journal().with_extension("sock")
    }

    /// Returns the folder of the settings.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

impl SpawnedAgent {
    fn log_lines(&mut self) -> impl Iterator<Item = String> + Send + use<> {
        let log = self.0.stderr.take().expect("it is piped");
        BufReader::new(log).lines().map_while(Result::ok)
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    /// Makes every write to a file fail from now on, or lets it succeed again.
    ///
    /// # Errors
    /// Fails if the system refuses.
    pub fn fill_disk(&self, is_full: bool) -> anyhow::Result<()> {
        let current = if is_full { Some(0) } else { None };
        let limit = Rlimit { current, maximum: None };
        rustix::process::prlimit(Some(self.pid()), Resource::Fsize, limit)?;
        Ok(())
    }

    /// Asks the process to stop, as a service manager does, and waits for its end.
    ///
    /// # Errors
    /// Fails if the process can't be signalled.
    pub fn terminate(mut self) -> anyhow::Result<ExitStatus> {
        rustix::process::kill_process(self.pid(), Signal::TERM)?;
        Ok(self.0.wait()?)
    }

    /// Kills the process, and waits for its end.
    ///
    /// # Errors
    /// Fails if it can't be waited for.
    pub fn kill(mut self) -> anyhow::Result<()> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }
}

impl Drop for SpawnedAgent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
