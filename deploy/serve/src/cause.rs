//! Guesses from an engine's last lines why it ended. Pure.

/// What an engine prints, in lower case, and what it means for the user. The first that is found
/// counts: the engine names a cause before its consequences, but a line can have several.
const CAUSES: [(&[&str], &str); 7] = [
    (
        &["no module named 'sglang'", "no module named sglang"],
        "this Python has no SGLang; start the engine by the Python of its environment",
    ),
    (
        &["unrecognized arguments", "invalid choice", "expected one argument"],
        "the engine doesn't know a flag; --no-flags leaves out those that Berth adds, which need \
         SGLang 0.5.22 or 0.5.23",
    ),
    (
        &["address already in use", "errno 98", "port is already", "is not available. please"],
        "a port is taken; stop what listens there, or give the engine another --port",
    ),
    (
        &[
            "out of memory",
            "outofmemoryerror",
            "not enough memory",
            "cannot allocate memory",
            "please try to increase --mem-fraction-static",
        ],
        "the memory doesn't suffice; give the engine a smaller --mem-fraction-static or \
         --context-length, more GPUs by --tp, or end what else uses the GPU",
    ),
    (
        &[
            "is not a local folder and is not a valid model identifier",
            "repositorynotfounderror",
            "repository not found",
            "does not appear to have a file named",
            "localentrynotfounderror",
            "can't load the configuration of",
            "incorrect path_or_model_id",
            "couldn't connect to",
            "unrecognized model in",
            "hfvalidationerror",
        ],
        "the model isn't there; check --model-path, the network and the right to download it",
    ),
    (
        &["no cuda gpus are available", "found no nvidia driver", "cuda driver version"],
        "no GPU can be used; check the driver and CUDA_VISIBLE_DEVICES, or give --device cpu",
    ),
    (&["permission denied"], "the engine may not use a file or a folder of its own"),
];

/// `None` if the lines show none that is known.
pub fn likely_cause<'a>(
    last_lines: impl DoubleEndedIterator<Item = &'a str>,
) -> Option<&'static str> {
    // The last lines are nearest to the end.
    last_lines.rev().find_map(|line| {
        let line = line.to_lowercase();
        let is_named = |(texts, _): &&(&[&str], &str)| texts.iter().any(|it| line.contains(it));
        CAUSES.iter().find(is_named).map(|(_, cause)| *cause)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_ends_of_an_engine_are_explained() {
        for (line, part) in [
            ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "memory"),
            ("OSError: [Errno 98] Address already in use", "port"),
            ("OSError: x is not a local folder and is not a valid model identifier", "model"),
            ("/usr/bin/python3: No module named sglang", "SGLang"),
            ("launch_server.py: error: unrecognized arguments: --enable-x", "--no-flags"),
            ("RuntimeError: No CUDA GPUs are available", "GPU"),
        ] {
            let cause = likely_cause(["Traceback:", line, "Killed"].into_iter());
            assert!(cause.is_some_and(|cause| cause.contains(part)), "{line}: {cause:?}");
        }
        assert_eq!(likely_cause(["all is well"].into_iter()), None);
    }
}
