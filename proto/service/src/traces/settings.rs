//! Defines the table `[traces]` of both processes' settings.

use std::path::PathBuf;

use http::Uri;

use crate::tls::client::ClientFiles;

crate::settings! {
    /// Where the spans of turns go.
    pub struct TracesTable {
        /// The collector, as `http://host:port` or `https://host:port`; it takes OTLP over gRPC.
        /// Empty, the default: no traces.
        endpoint: String;
        /// The PEM file of the CAs that sign the collector's certificate. Needed for `https`.
        ca: PathBuf;
        /// The share of turns that are traced, among those whose client doesn't say.
        ///
        /// A turn takes GPU seconds, and its ten spans together take about 4 KiB, so that most
        /// fleets can afford all.
        sample_ratio: f64 = 1.0;
    }
}

impl TracesTable {
    #[must_use]
    pub fn is_on(&self) -> bool {
        !self.endpoint.is_empty()
    }

    /// Returns the files for the connection to the collector, or `None` without TLS.
    #[must_use]
    pub fn client_files(&self) -> Option<ClientFiles> {
        let has_tls = self.is_on() && !self.ca.as_os_str().is_empty();
        let ca = self.ca.clone();
        has_tls.then_some(ClientFiles { ca, identity: None, server_name: None })
    }

    /// Returns the problems of the table, a sentence each.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let mut problems = vec![];
        let has_ca = !self.ca.as_os_str().is_empty();
        match collector_scheme(&self.endpoint) {
            Err(problem) if self.is_on() => problems.push(format!(
                "traces.endpoint: {:?} {problem}; write http://host:port, for OTLP over gRPC \
                 usually with port 4317",
                self.endpoint
            )),
            Ok(true) if !has_ca => problems
                .push("traces.ca: an https endpoint needs the CA of its certificate".to_owned()),
            Ok(false) if has_ca => problems.push(
                "traces.ca: is set, but traces.endpoint isn't https; write https://host:port"
                    .to_owned(),
            ),
            Ok(_) | Err(_) => {}
        }
        if !(0.0..=1.0).contains(&self.sample_ratio) {
            problems.push("traces.sample_ratio: must be between 0 and 1".to_owned());
        }
        problems
    }

    /// Reads the file once. Returns what is wrong with it.
    #[must_use]
    pub fn file_problem(&self) -> Option<String> {
        let error = self.client_files()?.check().err()?;
        Some(format!("[traces]: {error}"))
    }
}

/// Whether the collector speaks TLS. The error ends a sentence that begins with the URL.
fn collector_scheme(endpoint: &str) -> Result<bool, &'static str> {
    let uri: Uri = endpoint.parse().map_err(|_| "is no URL")?;
    let has_tls = match uri.scheme_str() {
        Some("http") => false,
        Some("https") => true,
        _ => return Err("is neither http nor https"),
    };
    let authority = uri.authority().ok_or("has no host")?;
    if authority.port_u16().is_none_or(|port| port == 0) {
        return Err("has no port");
    }
    if authority.as_str().contains('@') {
        return Err("has credentials, which would be in logs");
    }
    if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
        return Err("has a path");
    }
    Ok(has_tls)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(endpoint: &str, ca: &str, sample_ratio: f64) -> usize {
        TracesTable { endpoint: endpoint.into(), ca: ca.into(), sample_ratio }.problems().len()
    }

    #[test]
    fn traces_are_off_unless_a_collector_is_named() {
        let table = TracesTable::default();
        assert!(!table.is_on() && table.problems().is_empty() && table.client_files().is_none());
        assert_eq!(problems("http://collector:4317", "", 0.1), 0);
        assert_eq!(problems("https://[::1]:4317/", "/ca", 0.0), 0);
    }

    #[test]
    fn each_problem_of_the_table_is_told() {
        let wrong = [
            "collector:4317",
            "http://collector",
            "http://a:0",
            "http://key@a:1",
            "ftp://a:1",
            "http://a:4318/v1/traces",
        ];
        for endpoint in wrong {
            assert_eq!(problems(endpoint, "", 1.0), 1, "{endpoint} was taken");
        }
        assert_eq!(problems("https://a:1", "", 1.0), 1);
        assert_eq!(problems("http://a:1", "/ca", 1.0), 1, "it would not be encrypted");
        for ratio in [-0.1, 1.1, f64::NAN] {
            assert_eq!(problems("x", "", ratio), 2, "{ratio}");
        }
    }
}
