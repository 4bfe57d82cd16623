// Lets a C++ compiler build the kernels for the host, so that they run without a GPU.
//
// The threads of a block are fibers on one host thread; blocks run one after another. A fiber runs
// until its next barrier, of its warp or its block. A barrier that not all fibers reach ends the
// process; on a device it would hang. Every other launch runs blocks and threads in reverse order,
// which reveals results that depend on their order.
//
// The emulation can't show a data race, because fibers switch only at barriers. It takes one launch
// at a time; the caller holds a lock. Grids and blocks must be one-dimensional, blocks and masks
// whole warps.
#pragma once

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __shared__ static

struct uint4 {
  unsigned x, y, z, w;
};

namespace emulate {

constexpr unsigned WARP = 32, THREADS_MAX = 1024, STACK_BYTES = 64 * 1024;

// A fiber in the state `warp` or `block` waits at a barrier of its warp or block.
enum class FiberState { run, warp, block, end };

struct Fiber {
  jmp_buf resume_point;
  bool has_stack;
  FiberState state;
  unsigned thread;
  // The value that the fiber shows to its warp. Two slots alternate, because a lane may show its
  // next value while other lanes still read this one.
  unsigned long long shown[2];
  unsigned next_slot;
};

struct Index {
  unsigned x;
};

inline Fiber fibers[THREADS_MAX];
inline Fiber* current;
// Where a fiber jumps to when it stops.
inline jmp_buf scheduler;
inline Index block_index, block_dim, grid_dim;
// Of the running launch.
inline void (*body)(void*);
inline void* argument;
inline bool backwards;

[[noreturn]] inline void stop(const char* why) {
  fprintf(stderr, "kernel emulation: block %u: %s\n", block_index.x, why);
  abort();
}

// Switches without saving the signal mask, which would cost two system calls: `makecontext` starts
// a fiber once, and every later switch is a jump.
[[gnu::noinline]] inline void yield(FiberState state) {
  current->state = state;
  if (_setjmp(current->resume_point) == 0) _longjmp(scheduler, 1);
}

// A fiber outlives the launch; the next launch resumes it at the end of this loop.
inline void fiber_main() {
  for (;;) {
    body(argument);
    yield(FiberState::end);
  }
}

inline void start_fiber(Fiber& fiber) {
  static ucontext_t unused;
  ucontext_t start;
  getcontext(&start);
  start.uc_stack.ss_sp = malloc(STACK_BYTES);
  start.uc_stack.ss_size = STACK_BYTES;
  start.uc_link = nullptr;
  if (!start.uc_stack.ss_sp) stop("no memory for a stack");
  makecontext(&start, fiber_main, 0);
  fiber.has_stack = true;
  swapcontext(&unused, &start);
}

[[gnu::noinline]] inline void resume(Fiber& fiber) {
  current = &fiber;
  fiber.state = FiberState::run;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.has_stack) _longjmp(fiber.resume_point, 1);
  start_fiber(fiber);
}

inline unsigned count(const Fiber* group, unsigned n, FiberState state) {
  unsigned matching = 0;
  for (unsigned i = 0; i < n; i++) matching += group[i].state == state;
  return matching;
}

// Runs a warp until all its threads wait for the block or have ended.
inline void run_warp(Fiber* warp) {
  do {
    for (unsigned i = 0; i < WARP; i++) resume(warp[backwards ? WARP - 1 - i : i]);
  } while (count(warp, WARP, FiberState::warp) == WARP);
  if (count(warp, WARP, FiberState::warp) != 0) {
    stop("a part of a warp waits for the rest, which doesn't come");
  }
}

inline void run_block(unsigned threads) {
  for (unsigned i = 0; i < threads; i++) fibers[i].thread = i, fibers[i].next_slot = 0;
  do {
    for (unsigned i = 0; i < threads; i += WARP) {
      run_warp(fibers + (backwards ? threads - WARP - i : i));
    }
  } while (count(fibers, threads, FiberState::block) == threads);
  if (count(fibers, threads, FiberState::end) != threads) {
    stop("a part of a block waits for the rest, which doesn't come");
  }
}

inline void launch(unsigned grid, unsigned threads, void (*kernel)(void*), void* params) {
  const bool whole_warps = threads > 0 && threads % WARP == 0 && threads <= THREADS_MAX;
  if (!whole_warps) stop("not a block of whole warps");
  body = kernel, argument = params;
  block_dim.x = threads, grid_dim.x = grid;
  for (unsigned i = 0; i < grid; i++) {
    block_index.x = backwards ? grid - 1 - i : i;
    run_block(threads);
  }
  backwards = !backwards;
}

inline Index thread_index() { return Index{current->thread}; }

inline const Fiber* warp_of(const Fiber* fiber) { return fiber - fiber->thread % WARP; }

struct Shown {
  const Fiber* warp;
  unsigned slot;
  unsigned long long operator[](unsigned lane) const { return warp[lane].shown[slot]; }
};

// Shows a value to the warp, and returns the values of all lanes once all have shown theirs.
inline Shown show(unsigned mask, unsigned long long value) {
  if (mask != 0xFFFFFFFFu) stop("only whole warps are emulated");
  const unsigned slot = current->next_slot;
  current->next_slot = 1 - slot;
  current->shown[slot] = value;
  yield(FiberState::warp);
  return Shown{warp_of(current), slot};
}

}  // namespace emulate

#define threadIdx (emulate::thread_index())
#define blockIdx (emulate::block_index)
#define blockDim (emulate::block_dim)
#define gridDim (emulate::grid_dim)

inline void __syncthreads() { emulate::yield(emulate::FiberState::block); }

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, unsigned lanes) {
  const unsigned lane = emulate::current->thread % emulate::WARP;
  return T(emulate::show(mask, value)[(lane ^ lanes) % emulate::WARP]);
}

inline unsigned __ballot_sync(unsigned mask, bool value) {
  const emulate::Shown shown = emulate::show(mask, value);
  unsigned all = 0;
  for (unsigned lane = 0; lane < emulate::WARP; lane++) all |= unsigned(shown[lane] != 0) << lane;
  return all;
}

inline unsigned __popc(unsigned value) { return unsigned(__builtin_popcount(value)); }

template <typename T>
T atomicAdd(T* address, T value) {
  const T before = *address;
  *address = before + value;
  return before;
}

template <typename T>
T atomicOr(T* address, T value) {
  const T before = *address;
  *address = before | value;
  return before;
}

template <typename T>
T atomicExch(T* address, T value) {
  const T before = *address;
  *address = value;
  return before;
}

template <typename T>
T atomicCAS(T* address, T expected, T value) {
  const T before = *address;
  if (before == expected) *address = value;
  return before;
}
