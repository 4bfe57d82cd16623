// Kernels that count the pages of an engine's KV pool on a CUDA device, by owner and by session.
//
// kernels/src/reference.rs defines what each kernel computes, and explains the page list, the marks
// and the classes. kernels/src/cuda/account.rs checks what each kernel relies on, and launches it.
// The kernels only read the engine's memory.
//
// All arithmetic is on integers and every sum commutes, so results depend neither on the order of
// threads nor on the shape of a launch. Page ids and list entries are never trusted: values outside
// the pool are counted or skipped. Rows are trusted, because the host has checked them.
//
// A kernel whose parameters change gets another name, by which a library of another release notices
// that its kernel is missing, and doesn't launch this one with wrong parameters.
//
// Blocks are one-dimensional and whole warps. All lanes of a warp must reach each sum.

typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

constexpr u32 WARP = 32;
constexpr u32 FULL_WARP = 0xFFFFFFFFu;
constexpr u32 PAGE_BAD = 0xFFFFFFFFu;
constexpr u32 OWNER_NONE = 0xFFFFFFFFu;
constexpr u32 OWNER_SHARED = 0xFFFFFFFEu;

struct LiveRow {
  u32 row, len, session, list_start;
};

struct SessionPages {
  u64 refs, exclusive_pages, share_q32, runs, tail_tokens, freed_by_close;
};

struct ClassifyResult {
  u64 classes[8], free_runs, aliased_pages;
};

struct KvBuffer {
  const unsigned char* address;
  u64 page_bytes;
};

// ---- Sums ----------------------------------------------------------------------------------

__device__ inline u64 warp_sum(u64 value) {
  for (u32 lanes = WARP / 2; lanes > 0; lanes /= 2) {
    value += __shfl_xor_sync(FULL_WARP, value, lanes);
  }
  return value;
}

// Adds the threads' values to `out`, with one atomic per counter and block, because the blocks of
// one session all add to the same few words.
template <u32 N>
__device__ void block_add(const u64 (&values)[N], u64* out) {
  static_assert(N <= WARP, "one thread per counter");
  __shared__ u64 total[N];
  if (threadIdx.x < N) total[threadIdx.x] = 0;
  __syncthreads();
  for (u32 i = 0; i < N; i++) {
    const u64 sum = warp_sum(values[i]);
    if (threadIdx.x % WARP == 0) atomicAdd(&total[i], sum);
  }
  __syncthreads();
  if (threadIdx.x < N && total[threadIdx.x] != 0) {
    atomicAdd(&out[threadIdx.x], total[threadIdx.x]);
  }
}

// ---- Live rows: `row_blocks` blocks per row, neighbouring threads on neighbouring pages -------

// The pages of a row that one thread handles, as indexes in the row.
struct Span {
  u64 begin, end, step;
};

__device__ inline Span pages_of(const LiveRow& row, u32 row_blocks, u32 shift) {
  const u64 page = 1ull << shift;
  return Span{
      u64(blockIdx.x % row_blocks) * blockDim.x + threadIdx.x,
      (row.len + page - 1) >> shift,
      u64(row_blocks) * blockDim.x,
  };
}

// Writes the page list. `r2t` is req_to_token. The scheduler may change it during the read, so each
// entry is read once, as one load.
extern "C" __global__ void kv_gather_pages(const volatile int* r2t, u64 stride, u64 table_rows,
                                           const LiveRow* rows, u32 nrows, u32 row_blocks,
                                           u32 shift, u32 npages, u32* page_list, u64* bad_slots) {
  if (blockIdx.x / row_blocks >= nrows) return;
  const LiveRow row = rows[blockIdx.x / row_blocks];
  const Span span = pages_of(row, row_blocks, shift);
  u64 sums[1] = {0};
  for (u64 i = span.begin; i < span.end; i += span.step) {
    const u64 column = i << shift;
    const bool inside = row.row < table_rows && column < stride;
    const int slot = inside ? r2t[row.row * stride + column] : 0;
    const u32 page = u32(slot) >> shift;
    const bool sound = slot > 0 && page < npages && page << shift == u32(slot);
    page_list[row.list_start + i] = sound ? page : PAGE_BAD;
    sums[0] += !sound;
  }
  block_add(sums, bad_slots);
}

// Counts each page's references and sets its owner. An owner only changes from none to a session to
// shared, so the order of threads doesn't matter.
extern "C" __global__ void kv_mark(const LiveRow* rows, u32 nrows, u32 row_blocks, u32 shift,
                                   u32 npages, const u32* page_list, u32* refcnt, u32* owner) {
  if (blockIdx.x / row_blocks >= nrows) return;
  const LiveRow row = rows[blockIdx.x / row_blocks];
  const Span span = pages_of(row, row_blocks, shift);
  for (u64 i = span.begin; i < span.end; i += span.step) {
    const u32 page = page_list[row.list_start + i];
    if (page >= npages) continue;
    atomicAdd(&refcnt[page], 1u);
    const u32 before = atomicCAS(&owner[page], OWNER_NONE, row.session);
    const bool others = before != OWNER_NONE && before != row.session;
    if (others && before != OWNER_SHARED) atomicExch(&owner[page], OWNER_SHARED);
  }
}

// The bitmap `claimed` has the pages that are already counted as exclusive, so that each page
// counts once. `tree` is a bitmap.
extern "C" __global__ void kv_session(const LiveRow* rows, u32 nrows, u32 row_blocks, u32 shift,
                                      u32 npages, const u32* page_list, const u32* refcnt,
                                      const u32* owner, const u32* tree, u32* claimed,
                                      SessionPages* out) {
  if (blockIdx.x / row_blocks >= nrows) return;
  const LiveRow row = rows[blockIdx.x / row_blocks];
  const Span span = pages_of(row, row_blocks, shift);
  u64 refs = 0, exclusive = 0, share = 0, runs = 0, tail = 0, freed = 0;
  for (u64 i = span.begin; i < span.end; i += span.step) {
    const u32* entry = page_list + row.list_start + i;
    const u32 page = *entry;
    if (page >= npages) continue;
    refs += 1;
    const u32 sharers = refcnt[page];
    share += (1ull << 32) / (sharers > 1 ? sharers : 1);
    runs += i == 0 || entry[-1] + 1 != page;
    if (owner[page] != row.session) continue;
    const u32 word = page / WARP, bit = 1u << page % WARP;
    if (atomicOr(&claimed[word], bit) & bit) continue;
    exclusive += 1;
    freed += !(tree[word] & bit);
  }
  if (span.begin == 0) tail = (span.end << shift) - row.len;
  const u64 sums[6] = {refs, exclusive, share, runs, tail, freed};
  static_assert(sizeof(sums) == sizeof(SessionPages), "one sum per field, in their order");
  block_add(sums, &out[row.session].refs);
}

// ---- Sets of pages ----------------------------------------------------------------------------

// Adds the pages of a list to a bitmap. Only the first slot of a page names the page; the other
// slots need only be inside the pool.
extern "C" __global__ void kv_list_to_bitmap(const i64* ids, u64 n, u32 shift, u32 npages,
                                             u32* bitmap, u64* fault_counts) {
  u64 sums[2] = {0, 0};
  for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < n;
       i += u64(gridDim.x) * blockDim.x) {
    const i64 id = ids[i];
    const i64 page = id >> shift;
    if (id < 0 || page >= npages) {
      sums[1] += 1;
    } else if (page << shift == id) {
      const u32 bit = 1u << page % WARP;
      sums[0] += (atomicOr(&bitmap[page / WARP], bit) & bit) != 0;
    }
  }
  block_add(sums, fault_counts);
}

// A warp computes one word of each bitmap from 32 neighbouring pages, read together.
extern "C" __global__ void kv_ref_bitmap(const u32* refcnt, const u32* owner, u32 npages,
                                         u32* referenced, u32* shared) {
  const u32 lane = threadIdx.x % WARP;
  const u64 warps = u64(gridDim.x) * (blockDim.x / WARP);
  for (u64 word = (u64(blockIdx.x) * blockDim.x + threadIdx.x) / WARP; word * WARP < npages;
       word += warps) {
    const u64 page = word * WARP + lane;
    const bool inside = page < npages;
    const u32 is_referenced = __ballot_sync(FULL_WARP, inside && refcnt[page] > 0);
    const u32 is_shared = __ballot_sync(FULL_WARP, inside && owner[page] == OWNER_SHARED);
    if (lane == 0) {
      referenced[word] = is_referenced;
      shared[word] = is_shared;
    }
  }
}

// A class number has three bits: free, referenced, in the tree.
extern "C" __global__ void kv_classify(const u32* free, const u32* referenced, const u32* tree,
                                       const u32* shared, u32 npages, ClassifyResult* out) {
  u64 sums[10] = {};
  for (u64 word = u64(blockIdx.x) * blockDim.x + threadIdx.x; word * WARP < npages;
       word += u64(gridDim.x) * blockDim.x) {
    const u64 left = npages - word * WARP;
    const u32 pages = left < WARP ? (1u << left) - 1 : FULL_WARP;
    const u32 f = free[word], r = referenced[word], t = tree[word];
    for (u32 number = 0; number < 8; number++) {
      const u32 same = (number & 4 ? f : ~f) & (number & 2 ? r : ~r) & (number & 1 ? t : ~t);
      sums[number] += __popc(same & pages);
    }
    const u32 before = f << 1 | (word > 0 ? free[word - 1] >> 31 : 0);
    sums[8] += __popc(f & ~before);
    sums[9] += __popc(shared[word] & ~t);
  }
  static_assert(sizeof(sums) == sizeof(ClassifyResult), "one sum per field, in their order");
  block_add(sums, out->classes);
}

// ---- Digests ------------------------------------------------------------------------------------

// The finalizer of splitmix64.
__device__ inline u64 mix(u64 word) {
  word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9ull;
  word = (word ^ word >> 27) * 0x94D049BB133111EBull;
  return word ^ word >> 31;
}

// `place` is the index of the word in the page.
__device__ inline u64 keyed(u64 word, u64 buffer, u64 place) {
  return mix(word ^ ((buffer + 1) << 32 | place) * 0x9E3779B97F4A7C15ull);
}

// One block per page, with 16-byte loads. Each team of `team` threads reads other buffers than the
// other teams, because a page of one token has few bytes per buffer. The engine may write to a page
// during the read. The caller compares only digests of sealed pages.
extern "C" __global__ void kv_digest_pages(const KvBuffer* buffers, u32 nbuf, u32 team, u32 npages,
                                           const u32* pages, u32 n, u64* out) {
  const u32 teams = blockDim.x / team;
  // The last threads, if they are too few for a team, read nothing.
  const u32 first = threadIdx.x / team < teams ? threadIdx.x / team : nbuf;
  for (u64 i = blockIdx.x; i < n; i += gridDim.x) {
    const u32 page = pages[i];
    u64 sums[1] = {0};
    for (u32 b = first; b < nbuf && page < npages; b += teams) {
      const KvBuffer buffer = buffers[b];
      const uint4* vectors = (const uint4*)(buffer.address + page * buffer.page_bytes);
      for (u64 v = threadIdx.x % team; v < buffer.page_bytes / 16; v += team) {
        const uint4 four = vectors[v];
        sums[0] += keyed(u64(four.y) << 32 | four.x, b, 2 * v);
        sums[0] += keyed(u64(four.w) << 32 | four.z, b, 2 * v + 1);
      }
    }
    block_add(sums, &out[i]);
  }
}
