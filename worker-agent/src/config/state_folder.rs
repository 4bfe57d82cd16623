//! Finds the agent's state folder where no setting names one.
//!
//! The folder must survive a restart of the agent, and no other user may write to it or above it,
//! so it isn't in the shared folder for temporary files. The shim (Berth's part inside the engine)
//! looks for the agent's socket at the same places: `socket_paths` in `berth_shim/link.py`.

use std::{
    ffi::OsString,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use service::private_folder::own_uid;

/// The folder that a service manager or an operator makes for the agent's user.
const SYSTEM_FOLDER: &str = "/run/berth";

/// Returns the state folder of this process's user.
pub(super) fn default_state_folder() -> PathBuf {
    let uid = own_uid();
    let is_own = |folder: &Path| {
        std::fs::symlink_metadata(folder)
            .is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == uid)
    };
    choose(|name| std::env::var_os(name), std::env::home_dir(), is_own)
}

/// Returns the first folder that can be used. `is_own` says whether a folder exists and belongs to
/// the user.
fn choose(
    variable: impl Fn(&str) -> Option<OsString>,
    home: Option<PathBuf>,
    is_own: impl Fn(&Path) -> bool,
) -> PathBuf {
    // A relative path would depend on where the process was started.
    let folder = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    if let Some(runtime) = folder("XDG_RUNTIME_DIR").filter(|path| is_own(path)) {
        return runtime.join("berth");
    }
    if is_own(Path::new(SYSTEM_FOLDER)) {
        return SYSTEM_FOLDER.into();
    }
    let state = folder("XDG_STATE_HOME");
    state.unwrap_or_else(|| home.unwrap_or("/".into()).join(".local/state")).join("berth")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_folder_of_this_user_is_chosen() {
        let chosen = |variables: &[(&str, &str)], own: &[&str]| {
            let variable = |name: &str| {
                let set = variables.iter().find(|(set, _)| *set == name);
                set.map(|(_, value)| OsString::from(value))
            };
            choose(variable, Some("/h".into()), |path| own.iter().any(|own| path == *own))
        };
        let runtime = ("XDG_RUNTIME_DIR", "/run/user/7");
        let state = ("XDG_STATE_HOME", "/state");
        for (variables, own, want) in [
            (&[runtime, state][..], &["/run/user/7", "/run/berth"][..], "/run/user/7/berth"),
            (&[runtime], &["/run/berth"], "/run/berth"),
            (&[("XDG_RUNTIME_DIR", "own"), state], &["own"], "/state/berth"),
            (&[runtime], &[], "/h/.local/state/berth"),
        ] {
            assert_eq!(chosen(variables, own), Path::new(want), "{variables:?}, {own:?}");
        }
    }
}
