// Offers the kernels, built as host code, through a small C interface that finds them by name.
//
// The macro KV_SOURCE names the source to compile: the real one, or a copy with a planted mistake.
//
//   int   kv_host_find(name)                    the kernel's number, or -1
//   void* kv_host_bind(kernel, params)          copies the arguments, as a driver does at a launch
//   void  kv_host_run(kernel, bound, grid, threads)   runs the kernel, and frees the arguments

#include "emulate.h"

#include KV_SOURCE

#include <tuple>
#include <utility>

namespace {

template <auto kernel, typename... Args>
struct TypedKernel {
  using Bound = std::tuple<Args...>;

  template <size_t... I>
  static void* copy(void** params, std::index_sequence<I...>) {
    return new Bound(*static_cast<Args*>(params[I])...);
  }
  static void* bind(void** params) { return copy(params, std::index_sequence_for<Args...>()); }
  static void call(void* bound) { std::apply(kernel, *static_cast<Bound*>(bound)); }
  static void run(void* bound, unsigned grid, unsigned threads) {
    emulate::launch(grid, threads, call, bound);
    delete static_cast<Bound*>(bound);
  }
};

struct Kernel {
  const char* name;
  void* (*bind)(void**);
  void (*run)(void*, unsigned, unsigned);
};

template <auto kernel, typename... Args>
constexpr Kernel typed(const char* name, void (*)(Args...)) {
  return Kernel{name, TypedKernel<kernel, Args...>::bind, TypedKernel<kernel, Args...>::run};
}

#define KERNEL(kernel) typed<kernel>(#kernel, kernel)
const Kernel KERNELS[] = {
    KERNEL(kv_gather_pages), KERNEL(kv_mark),     KERNEL(kv_session),     KERNEL(kv_list_to_bitmap),
    KERNEL(kv_ref_bitmap),   KERNEL(kv_classify), KERNEL(kv_digest_pages),
};

}  // namespace

extern "C" int kv_host_find(const char* name) {
  int number = 0;
  for (const Kernel& kernel : KERNELS) {
    if (strcmp(kernel.name, name) == 0) return number;
    number++;
  }
  return -1;
}

extern "C" void* kv_host_bind(int kernel, void** params) { return KERNELS[kernel].bind(params); }

extern "C" void kv_host_run(int kernel, void* bound, unsigned grid, unsigned threads) {
  KERNELS[kernel].run(bound, grid, threads);
}
