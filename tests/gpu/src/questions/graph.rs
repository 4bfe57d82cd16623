//! Whether a stream can write words around and inside the replay of a CUDA graph, and at what cost.

use super::us;
use anyhow::{Context, ensure};
use cudarc::driver::sys::{self, CUresult, CUstream, CUstreamCaptureMode};
use kernels::cuda::{Device, DeviceBuffer};
use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ptr,
    sync::atomic::{AtomicU64, Ordering},
};
use tokio::time::Instant;

const PAGE: usize = 4096;
const REPLAYS: u64 = 100;
const WRITES: u64 = 1000;

/// Replays a graph between two writes many times, then a graph that contains a write itself.
/// Returns the text of the result, and whether a row table can rely on such writes.
pub(crate) fn words_around(device: &Device) -> anyhow::Result<(String, bool)> {
    let words = Words::new()?;
    // SAFETY: the page belongs to `words`, and outlives the registration.
    let registered = unsafe { device.register(words.page, PAGE)? };
    let address = registered.device_address();
    let stream = device.stream() as CUstream;
    let _current = Current::enter(stream)?;
    let mut work: DeviceBuffer<u8> = device.alloc(16 << 20)?;
    let write = |word: u64, value: u64| {
        // SAFETY: the stream is the device's; the words stay until the stream is synchronized,
        // below.
        unsafe { device.write_value(device.stream(), address + 8 * word, value) }
    };

    let graph = Graph::capture(stream, || Ok(device.fill(&mut work, 1)?))?;
    for replay in 1..=REPLAYS {
        write(0, replay)?;
        graph.launch(stream)?;
        write(1, replay)?;
    }
    device.synchronize()?;
    let around = (words.get(0), words.get(1)) == (REPLAYS, REPLAYS);

    let inside = Graph::capture(stream, || Ok(write(2, 7)?));
    let inside = match inside {
        Ok(graph) => {
            graph.launch(stream)?;
            device.synchronize()?;
            if words.get(2) == 7 { "works" } else { "is lost" }.to_owned()
        }
        Err(error) => format!("is refused ({error})"),
    };

    let begin = Instant::now();
    for value in 1..=WRITES {
        write(3, value)?;
    }
    let host = us(begin.elapsed()) / WRITES as f64;
    device.synchronize()?;
    let both = us(begin.elapsed()) / WRITES as f64;
    let said = format!(
        "around: {}; inside: {inside}; a write takes the host {host:.2} us, {both:.2} us in all",
        if around { "works" } else { "is lost" },
    );
    Ok((said, around))
}

/// Makes a stream's context the thread's own, as graphs need it. The device does so in its calls
/// only.
struct Current;

impl Current {
    fn enter(stream: CUstream) -> anyhow::Result<Self> {
        let mut context = ptr::null_mut();
        // SAFETY: the stream is the device's, whose context outlives this value.
        unsafe {
            check("a stream's context", sys::cuStreamGetCtx(stream, &raw mut context))?;
            check("a context", sys::cuCtxPushCurrent_v2(context))?;
        }
        Ok(Self)
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        let mut context = ptr::null_mut();
        // SAFETY: pushed by `enter`.
        unsafe { sys::cuCtxPopCurrent_v2(&raw mut context) };
    }
}

/// A page of words in host memory.
struct Words {
    page: *mut u8,
}

impl Words {
    fn layout() -> Layout {
        Layout::from_size_align(PAGE, PAGE).expect("a page is a valid layout")
    }

    fn new() -> anyhow::Result<Self> {
        // SAFETY: the layout's size isn't zero.
        let page = unsafe { alloc_zeroed(Self::layout()) };
        ensure!(!page.is_null(), "no memory for a page");
        Ok(Self { page })
    }

    fn get(&self, word: usize) -> u64 {
        // SAFETY: inside the page and aligned; the device writes it as one word.
        unsafe { AtomicU64::from_ptr(self.page.cast::<u64>().add(word)) }.load(Ordering::Acquire)
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: allocated with the same layout; its registration ended before.
        unsafe { dealloc(self.page, Self::layout()) };
    }
}

/// A graph that can be launched.
struct Graph {
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
}

impl Graph {
    /// Captures what `enqueue` adds to the stream.
    fn capture(
        stream: CUstream,
        enqueue: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<Self> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is the device's, and captures nothing yet.
        check("capture", unsafe { sys::cuStreamBeginCapture_v2(stream, mode) })?;
        let enqueued = enqueue();
        let (mut graph, mut exec) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the capture began above. It must end also if `enqueue` failed.
        let ended = unsafe { sys::cuStreamEndCapture(stream, &raw mut graph) };
        enqueued?;
        check("the end of a capture", ended)?;
        // SAFETY: the graph was created above.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0) };
        let captured = Self { graph, exec };
        check("a graph", made).context("instantiated")?;
        Ok(captured)
    }

    fn launch(&self, stream: CUstream) -> anyhow::Result<()> {
        // SAFETY: both exist.
        check("a launch", unsafe { sys::cuGraphLaunch(self.exec, stream) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once; a null handle is skipped.
        unsafe {
            if !self.exec.is_null() {
                sys::cuGraphExecDestroy(self.exec);
            }
            if !self.graph.is_null() {
                sys::cuGraphDestroy(self.graph);
            }
        }
    }
}

fn check(what: &str, answer: CUresult) -> anyhow::Result<()> {
    ensure!(answer == CUresult::CUDA_SUCCESS, "{what}: {}", answer as u32);
    Ok(())
}
