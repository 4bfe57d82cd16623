//! A Kubernetes cluster without nodes: etcd and a real API server, with roles and tokens.
//!
//! The API server is built from its Go modules by `tests/fleet/kubernetes/install`; etcd is that of
//! the system. `curl` speaks to the API server for the operator.

use std::{
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use engine_sim::loopback::own_addr;
use serde_json::{Value, json};
use tokio::{
    io::AsyncWriteExt as _,
    process::{Child, Command},
};

const SLICES: &str = "/apis/discovery.k8s.io/v1/namespaces/berth/endpointslices";
const ADMIN_TOKEN: &str = "token-of-the-admin";
const ROUTER_TOKEN: &str = "token-of-the-router";
/// The processes have this long to start.
const START_TRIES: usize = 600;

/// Returns an address of this host that isn't loopback: endpoints may not be. Nothing is sent.
pub(super) async fn own_ip() -> anyhow::Result<IpAddr> {
    let socket = tokio::net::UdpSocket::bind("0.0.0.0:0").await?;
    socket.connect("198.51.100.1:9").await.context("this host has no address but loopback")?;
    Ok(socket.local_addr()?.ip())
}

/// Returns a slice with one endpoint.
pub(super) fn slice(name: &str, address: SocketAddr, conditions: &Value) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "labels": { "kubernetes.io/service-name": "berth-agents" },
        },
        "addressType": "IPv4",
        "endpoints": [{ "addresses": [address.ip().to_string()], "conditions": conditions }],
        "ports": [{ "name": "control", "port": address.port() }],
    })
}

/// Returns a free port of an address that no other process uses.
async fn free_address() -> anyhow::Result<SocketAddr> {
    Ok(tokio::net::TcpListener::bind(own_addr()).await?.local_addr()?)
}

/// etcd and an API server.
pub(super) struct Cluster {
    folder: PathBuf,
    program: String,
    etcd: Child,
    etcd_address: SocketAddr,
    api_server: Option<Child>,
    address: SocketAddr,
}

impl Cluster {
    pub(super) async fn start(folder: &Path) -> anyhow::Result<Self> {
        let install = Path::new(env!("CARGO_MANIFEST_DIR")).join("fleet/kubernetes/install");
        let installed = Command::new(install).stderr(Stdio::inherit()).output().await?;
        ensure!(installed.status.success(), "the API server can't be built; see above");
        let program = String::from_utf8(installed.stdout)?.trim().to_owned();
        let (etcd_address, peers) = (free_address().await?, free_address().await?);
        let (clients, peers) = (format!("http://{etcd_address}"), format!("http://{peers}"));
        let log = std::fs::File::create(folder.join("etcd.log"))?;
        let etcd = Command::new("etcd")
            .arg("--data-dir")
            .arg(folder.join("etcd"))
            .args(["--listen-client-urls", &clients, "--advertise-client-urls", &clients])
            .args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers])
            .args(["--initial-cluster", &format!("default={peers}")])
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .context("etcd can't start; install the package etcd-server")?;
        let address = free_address().await?;
        let key = rcgen::generate_simple_self_signed(vec![address.ip().to_string()])?;
        std::fs::write(folder.join("api.crt"), key.cert.pem())?;
        std::fs::write(folder.join("api.key"), key.signing_key.serialize_pem())?;
        std::fs::write(folder.join("api.pub"), key.signing_key.public_key_pem())?;
        std::fs::write(
            folder.join("tokens.csv"),
            format!(
                "{ADMIN_TOKEN},admin,1,system:masters\n\
                 {ROUTER_TOKEN},system:serviceaccount:berth:berth-router,2,\n"
            ),
        )?;
        let folder = folder.to_owned();
        let mut cluster = Self { folder, program, etcd, etcd_address, api_server: None, address };
        cluster.start_api_server().await?;
        let namespace = json!({ "metadata": { "name": "berth" } });
        cluster
            .must("POST", "/api/v1/namespaces", "application/json", &namespace.to_string())
            .await?;
        Ok(cluster)
    }

    /// Starts the API server, and waits until it is ready.
    pub(super) async fn start_api_server(&mut self) -> anyhow::Result<()> {
        let file = |name: &str| self.folder.join(name).display().to_string();
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.folder.join("api-server.log"))?;
        let ip = self.address.ip().to_string();
        let api_server = Command::new(&self.program)
            .arg(format!("--etcd-servers=http://{}", self.etcd_address))
            .arg(format!("--bind-address={ip}"))
            .arg(format!("--secure-port={}", self.address.port()))
            .args(["--authorization-mode=RBAC", "--service-cluster-ip-range=10.96.0.0/24"])
            .arg(format!("--advertise-address={}", own_ip().await?))
            .arg("--service-account-issuer=https://berth.test")
            .arg(format!("--service-account-key-file={}", file("api.pub")))
            .arg(format!("--service-account-signing-key-file={}", file("api.key")))
            .arg(format!("--tls-cert-file={}", file("api.crt")))
            .arg(format!("--tls-private-key-file={}", file("api.key")))
            .arg(format!("--token-auth-file={}", file("tokens.csv")))
            .arg(format!("--cert-dir={}", file("certs")))
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true)
            .spawn()?;
        self.api_server = Some(api_server);
        for _ in 0..START_TRIES {
            let answer = self.call(ADMIN_TOKEN, "GET", "/readyz", "text/plain", "").await;
            if answer.is_ok_and(|(status, _)| status == 200) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        anyhow::bail!("the API server is not ready; see {}", file("api-server.log"))
    }

    /// Kills the API server.
    pub(super) async fn stop_api_server(&mut self) -> anyhow::Result<()> {
        let mut api_server = self.api_server.take().context("it doesn't run")?;
        Ok(api_server.kill().await?)
    }

    pub(super) async fn stop(mut self) -> anyhow::Result<()> {
        self.stop_api_server().await?;
        Ok(self.etcd.kill().await?)
    }

    /// Applies the manifest of the guide.
    pub(super) async fn apply_rbac(&self) -> anyhow::Result<()> {
        let manifest = include_str!("../../../deploy/kubernetes/discovery-rbac.yaml");
        let rbac = "/apis/rbac.authorization.k8s.io/v1/namespaces/berth";
        let paths = [
            "/api/v1/namespaces/berth/serviceaccounts".to_owned(),
            format!("{rbac}/roles"),
            format!("{rbac}/rolebindings"),
        ];
        for (document, path) in manifest.split("\n---\n").zip(paths) {
            self.must("POST", &path, "application/yaml", document).await?;
        }
        Ok(())
    }

    /// Creates or replaces a slice.
    pub(super) async fn put_slice(&self, slice: &Value) -> anyhow::Result<()> {
        let name = slice["metadata"]["name"].as_str().context("a slice has a name")?;
        let path = format!("{SLICES}/{name}");
        let kind = "application/apply-patch+yaml";
        let path = format!("{path}?fieldManager=test&force=true");
        self.must("PATCH", &path, kind, &slice.to_string()).await
    }

    pub(super) async fn delete_slice(&self, name: &str) -> anyhow::Result<()> {
        self.must("DELETE", &format!("{SLICES}/{name}"), "application/json", "").await
    }

    /// Makes etcd forget all versions but the newest, while the API server is down. A key of the
    /// operator's makes the newest version one that no watcher has seen.
    pub(super) async fn change_and_compact(&self, key: &str) -> anyhow::Result<()> {
        let url = format!("http://{}/v3/kv", self.etcd_address);
        // Base64 of the key, as etcd's gateway wants it.
        let put = json!({ "key": "YmVydGg=", "value": "MQ==" });
        let mut revision = Value::Null;
        for _ in 0..3 {
            revision = curl_json(&format!("{url}/put"), &put).await?["header"]["revision"].clone();
        }
        let compact = json!({ "revision": revision, "physical": true });
        let answer = curl_json(&format!("{url}/compaction"), &compact).await?;
        ensure!(answer.get("error").is_none(), "etcd did not compact {key}: {answer}");
        Ok(())
    }

    /// Whether the router's account may not list other objects.
    pub(super) async fn router_may_not(&self, resource: &str) -> anyhow::Result<bool> {
        let path = format!("/api/v1/namespaces/berth/{resource}");
        let (status, _) = self.call(ROUTER_TOKEN, "GET", &path, "application/json", "").await?;
        Ok(status == 403)
    }

    /// Writes a kubeconfig of the router's account. Returns its path.
    pub(super) fn router_kubeconfig(&self) -> anyhow::Result<PathBuf> {
        let authority = self.folder.join("api.crt");
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "c", "cluster": {
                "server": format!("https://{}", self.address), "certificate-authority": authority,
            } }],
            "users": [{ "name": "u", "user": { "token": ROUTER_TOKEN } }],
            "contexts": [{ "name": "x", "context": {
                "cluster": "c", "user": "u", "namespace": "berth",
            } }],
            "current-context": "x",
        });
        let path = self.folder.join("kubeconfig.json");
        std::fs::write(&path, config.to_string())?;
        Ok(path)
    }

    async fn must(&self, method: &str, path: &str, kind: &str, body: &str) -> anyhow::Result<()> {
        let (status, answer) = self.call(ADMIN_TOKEN, method, path, kind, body).await?;
        ensure!((200..300).contains(&status), "{method} {path}: {status}: {answer}");
        Ok(())
    }

    async fn call(
        &self,
        token: &str,
        method: &str,
        path: &str,
        kind: &str,
        body: &str,
    ) -> anyhow::Result<(u16, String)> {
        let authority = self.folder.join("api.crt").display().to_string();
        let authorization = format!("authorization: Bearer {token}");
        let kind = format!("content-type: {kind}");
        let url = format!("https://{}{path}", self.address);
        let args = ["--cacert", &authority, "-H", &authorization, "-H", &kind, "-X", method, &url];
        curl(&args, body).await
    }
}

async fn curl_json(url: &str, body: &Value) -> anyhow::Result<Value> {
    let (_, answer) = curl(&[url], &body.to_string()).await?;
    Ok(serde_json::from_str(&answer)?)
}

/// Runs `curl`. Returns the status and the body of the answer.
async fn curl(args: &[&str], body: &str) -> anyhow::Result<(u16, String)> {
    let mut command = Command::new("curl");
    command.args(["-sS", "--max-time", "10", "-w", "\n%{http_code}"]).args(args);
    if !body.is_empty() {
        command.args(["--data-binary", "@-"]);
    }
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.kill_on_drop(true).spawn().context("curl can't start")?;
    let mut stdin = child.stdin.take().context("curl has no input")?;
    stdin.write_all(body.as_bytes()).await?;
    drop(stdin);
    let output = child.wait_with_output().await?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let (answer, status) = text.rsplit_once('\n').context("curl gave no answer")?;
    let status = status.parse()?;
    ensure!(status != 0, "{}", String::from_utf8_lossy(&output.stderr));
    Ok((status, answer.to_owned()))
}
