/* libberth_kv: audits the KV pool of an engine from inside the engine's process.
 *
 * One audit is: berth_kv_begin, berth_kv_ready until it returns 1, berth_kv_finish.
 *
 *   begin   Call on the scheduler's thread, between two steps, with a snapshot of the engine's rows
 *           and page lists. On a device, begin only enqueues, on a stream of its own, behind the
 *           work that `stream` has so far. In host memory, begin copies and digests at once.
 *   ready   Returns 1 when the copy is made. Then read, on the scheduler's thread, the versions that
 *           the live rows have now.
 *   finish  Call with those versions, on any thread. Rows whose version has changed are left out and
 *           counted. Python's ctypes releases the GIL during the call. Writes the report; its bytes
 *           are described in kernels/src/report/bytes.rs, and its fields in kernels/src/report.rs.
 *
 * Calls on one handle never wait for each other: while a call runs, others return BERTH_KV_BUSY.
 * No call lets a panic out. Handles are numbers: a closed or unknown handle is an error.
 * Open and close only while the engine captures no CUDA graphs: both allocate or free memory there.
 *
 * Pointers to the structures and arrays below are to host memory, which is read only during the
 * call. The addresses inside them (uint64_t) are of the pool's memory, host or device. */
#ifndef BERTH_KV_H
#define BERTH_KV_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The return value of berth_kv_abi for this header. */
#define BERTH_KV_ABI 2

/* Error codes; berth_kv_error returns the text. */
#define BERTH_KV_INVALID (-1) /* an argument is null, or doesn't fit this pool */
#define BERTH_KV_BUSY (-2)    /* another call is running, or another audit is in progress */
#define BERTH_KV_STATE (-3)   /* not now: there is no audit, or its copy is not ready */
#define BERTH_KV_DEVICE (-4)  /* there is no CUDA, or it failed; close the handle */
#define BERTH_KV_SMALL (-5)   /* buffer too small: use berth_kv_report_bytes_max(sessions) bytes */
#define BERTH_KV_PANIC (-6)   /* a fault of this library; the handle is closed */
#define BERTH_KV_FULL (-7)    /* too many handles are open */

/* Value of `device` for a pool in host memory. */
#define BERTH_KV_HOST (-1)

typedef uint64_t berth_kv;

/* Page p is at addr + p * page_bytes. Both are multiples of 16. */
struct berth_kv_buffer {
    uint64_t addr;
    uint64_t page_bytes;
};

struct berth_kv_pool {
    uint32_t page_tokens; /* a power of two */
    uint32_t pages;       /* including the padding page 0: slots / page_tokens + 1 */
    uint64_t r2t;         /* address of req_to_token: int32, token slots of live rows */
    uint32_t r2t_rows;    /* including row 0 */
    uint32_t r2t_stride;  /* entries from one row to the next */
    const struct berth_kv_buffer *buffers; /* may be null; then there are no digests */
    uint32_t nbuffers;
    int32_t device; /* CUDA ordinal, or BERTH_KV_HOST */
};

struct berth_kv_row {
    uint32_t row;
    uint32_t len;              /* tokens whose slots are allocated */
    uint32_t session;          /* the session's number: an index into keys */
    uint32_t sealed_tokens;    /* not rewritten while the session's key stays the same; or 0 */
    uint32_t protected_tokens; /* leading tokens that the radix tree owns */
    uint32_t zero;
    uint64_t version; /* changes whenever [0, len) of the row may be rewritten */
};

/* A list of int64 ids. */
struct berth_kv_list {
    uint64_t addr;
    uint64_t n;
};

/* A snapshot of the engine's rows and page lists: every row that holds pages, and whole lists. */
struct berth_kv_snapshot {
    const struct berth_kv_row *rows;
    const uint64_t *keys;             /* per session: changes when its KV is computed anew */
    const struct berth_kv_list *free; /* free lists, as page ids */
    const struct berth_kv_list *tree; /* the radix tree's token slots */
    uint32_t nrows;
    uint32_t nsessions;
    uint32_t nfree;
    uint32_t digest_pages_max; /* sealed pages to digest in this audit, or 0 */
    uint64_t stream; /* CUstream whose work must finish before the snapshot is valid; 0: default */
};

uint32_t berth_kv_abi(void);

/* Returns the last error of this thread; valid until the thread's next call. Never null. */
const char *berth_kv_error(void);

/* Opens a pool. `fatbin` is the path of the kernels; null for host memory. While the handle is
 * open, r2t and buffers must stay valid. Returns 0 or an error. */
int32_t berth_kv_open(const struct berth_kv_pool *pool, const char *fatbin, berth_kv *out);

/* Begins an audit. The lists must stay valid and unchanged until finish or abandon returns. */
int32_t berth_kv_begin(berth_kv handle, const struct berth_kv_snapshot *snapshot);

/* Returns 1 when the copy is made, 0 before that, or an error. */
int32_t berth_kv_ready(berth_kv handle);

/* Ends the audit; `rows[i]` has the version `versions[i]` now. Returns the report's length in
 * bytes, or an error. After BERTH_KV_SMALL, BERTH_KV_BUSY and BERTH_KV_STATE the audit continues;
 * after other errors it is over. */
int64_t berth_kv_finish(berth_kv handle, const uint32_t *rows, const uint64_t *versions, uint32_t n,
                        uint8_t *buffer, uint64_t capacity);

/* Returns a size in bytes that is enough for the report of an audit of `nsessions` sessions. */
uint64_t berth_kv_report_bytes_max(uint32_t nsessions);

/* Abandons the audit in progress, if any; waits until nothing reads its lists. */
int32_t berth_kv_abandon(berth_kv handle);

/* Closes the handle and abandons its audit. A call running on the handle completes normally. */
int32_t berth_kv_close(berth_kv handle);

#ifdef __cplusplus
}
#endif

#endif
