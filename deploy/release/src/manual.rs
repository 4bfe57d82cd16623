//! Writes the manual pages of a program and its commands.

use std::{io, path::Path};

use clap::Command;
use clap_mangen::Man;

/// What the page of `berth-agent` says besides its flags.
pub(crate) const AGENT: &str = "\
.SH SIGNALS
.TP
.B SIGTERM
Drains: takes no new turns, and ends after the running ones. With \\fB\\-\\-handover\\fR the pinned
sessions stay open for the next agent, else they are closed.
.TP
.B SIGINT
Drains and closes all sessions.
.SH EXIT STATUS
.TP
.B 0
Stopped by a signal after a clean drain, or the settings are valid.
.TP
.B 1
The agent couldn't start, or one of its tasks ended.
.TP
.B 64
The arguments or settings are wrong. A restart doesn't help.
.SH ENVIRONMENT
.TP
.B BERTH_ENGINE_API_KEY, BERTH_ENGINE_ADMIN_API_KEY
The engine's keys, if it has them.
.TP
.B NOTIFY_SOCKET, WATCHDOG_USEC
Set by systemd: the agent tells when it serves, lives and stops.
.SH FILES
.TP
.I /etc/berth/agent.toml
The settings that the unit names. Examples are in /usr/share/doc/berth/examples.
.TP
.I /var/lib/berth
The journal of open sessions.
.TP
.I /run/berth/engine.sock
The socket of the shim, the plugin in the engine.
.SH SEE ALSO
.BR berth (1),
.BR berth\\-router (1)
";

/// What the page of `berth-serve` says besides its flags.
pub(crate) const SERVE: &str = "\
.SH SIGNALS
.TP
.B SIGTERM
Leaves: serves on for a while, then lets turns end, closes sessions, and stops the engines that it
started.
.TP
.B SIGINT
The same at once. A second signal waits for no turns, a third for no engines.
.SH EXIT STATUS
.TP
.B 0
Stopped by a signal.
.TP
.B 1
Something couldn't start, or a part of the process ended.
.TP
.B 64
The arguments or settings are wrong. A restart doesn't help.
.TP
.B others
Those of an engine that ended; 128 and the signal's number if a signal ended it.
.SH ENVIRONMENT
.TP
.B BERTH_ENGINE_API_KEY, BERTH_ENGINE_ADMIN_API_KEY
The engines' keys, if they have them.
.SH FILES
.TP
.I $XDG_RUNTIME_DIR/berth, or ~/.local/state/berth
The journals of open sessions, and the sockets of the shim.
.SH SEE ALSO
.BR berth (1),
.BR berth\\-agent (1),
.BR berth\\-router (1)
";

/// What the page of `berth-router` says besides its flags.
pub(crate) const ROUTER: &str = "\
.SH SIGNALS
.TP
.B SIGTERM
Leaves: says on the admin port that it isn't ready, serves on for a while, then drains.
.TP
.B SIGINT
Drains at once, as a second SIGTERM does: takes no new turns, and ends after the running ones.
.SH EXIT STATUS
.TP
.B 0
Stopped by a signal, or the settings are valid.
.TP
.B 1
The router couldn't start, or one of its tasks ended.
.TP
.B 64
The arguments or settings are wrong. A restart doesn't help.
.SH ENVIRONMENT
.TP
.B NOTIFY_SOCKET, WATCHDOG_USEC
Set by systemd: the router tells when it serves, lives and stops.
.SH FILES
.TP
.I /etc/berth/router.toml
The settings that the unit names. Examples are in /usr/share/doc/berth/examples.
.TP
.I /etc/berth/keys.toml
The keys of clients and operators, as digests.
.SH SEE ALSO
.BR berth (1),
.BR berth\\-agent (1)
";

/// Writes one page for the program and one for each of its commands. The program's page ends with
/// `more`, in the language of manual pages.
pub(crate) fn write(mut program: Command, more: &str, folder: &Path) -> io::Result<()> {
    program.build();
    write_page(&program, more, folder)?;
    write_commands(&program, folder)
}

fn write_commands(parent: &Command, folder: &Path) -> io::Result<()> {
    // `help` repeats what the pages say.
    for command in parent.get_subcommands().filter(|command| command.get_name() != "help") {
        write_page(command, "", folder)?;
        write_commands(command, folder)?;
    }
    Ok(())
}

fn write_page(command: &Command, more: &str, folder: &Path) -> io::Result<()> {
    // A command's page is named like `berth-session-show`.
    let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
    let page = Man::new(command.clone()).manual("Berth").source(env!("CARGO_PKG_VERSION"));
    let mut text = vec![];
    page.render(&mut text)?;
    text.extend_from_slice(more.as_bytes());
    std::fs::write(folder.join(format!("{name}.1")), text)
}
