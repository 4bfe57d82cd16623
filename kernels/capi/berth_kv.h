/* libberth_kv: audits the KV pool of an engine from inside the engine's process.
 *
 * One audit is: berth_kv_begin, berth_kv_ready until it answers 1, berth_kv_finish.
 *
 *   begin   on the scheduler's thread, between two steps, with a cut of the engine's books. On a
 *           device it only enqueues, on a stream of its own, behind what `stream` has so far; in
 *           host memory it copies, and digests, at once.
 *   ready   1 when the copy is made. Then, on the scheduler's thread, read the versions that the
 *           live rows have now.
 *   finish  with those versions, on any thread: rows whose version is another now are left out and
 *           counted. Python's ctypes gives up the GIL meanwhile. Writes the report; its bytes are
 *           described in kernels/src/report/bytes.rs.
 *
 * Calls about one handle never wait for each other: while one runs, others answer BERTH_KV_BUSY.
 * No call lets a panic out. Handles are numbers: one that was closed, or never was, is an error.
 * Open and close only while the engine captures no CUDA graphs: both allocate or free there.
 *
 * Pointers to structures and arrays below are in host memory, and read only during the call. The
 * addresses inside of them (uint64_t) are of the pool's place, host or device. */
#ifndef BERTH_KV_H
#define BERTH_KV_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What berth_kv_abi answers for this header. */
#define BERTH_KV_ABI 1

/* Answers below zero. berth_kv_error says more. */
#define BERTH_KV_INVALID (-1) /* an argument: null, or not of this pool */
#define BERTH_KV_BUSY (-2)    /* another call runs, or another audit is under way */
#define BERTH_KV_STATE (-3)   /* not now: no audit, or its copy was not seen ready */
#define BERTH_KV_DEVICE (-4)  /* no CUDA, or it failed; the handle is best closed */
#define BERTH_KV_SMALL (-5)   /* the buffer: berth_kv_report_bytes_max(sessions) is enough */
#define BERTH_KV_PANIC (-6)   /* a fault of this library; the handle is gone */
#define BERTH_KV_FULL (-7)    /* too many handles */
#define BERTH_KV_UNSHARED (-8) /* memory that no other process can map: only account in here */

/* `device` for a pool in host memory. */
#define BERTH_KV_HOST (-1)
/* `protected_tokens` that are not known. */
#define BERTH_KV_UNKNOWN UINT32_MAX

typedef uint64_t berth_kv;

/* Page p lies at addr + p * page_bytes. Both are multiples of 16. */
struct berth_kv_buffer {
    uint64_t addr;
    uint64_t page_bytes;
};

struct berth_kv_pool {
    uint32_t page_tokens; /* a power of two */
    uint32_t pages;       /* the padding page 0 included: slots / page_tokens + 1 */
    uint64_t r2t;         /* req_to_token: int32, slots of live rows */
    uint32_t r2t_rows;    /* row 0 included */
    uint32_t r2t_stride;  /* entries from one row to the next */
    const struct berth_kv_buffer *buffers; /* may be null: no digests then */
    uint32_t nbuffers;
    int32_t device; /* CUDA ordinal, or BERTH_KV_HOST */
};

struct berth_kv_row {
    uint32_t row;
    uint32_t len;              /* tokens whose slots are allocated */
    uint32_t session;          /* its number: an index into keys */
    uint32_t sealed_tokens;    /* nothing rewrites them while the session's key stays; or 0 */
    uint32_t protected_tokens; /* of its prefix, the tree's; or BERTH_KV_UNKNOWN */
    uint32_t zero;
    uint64_t version; /* another whenever [0, len) of the row may be rewritten */
};

/* int64 ids. */
struct berth_kv_list {
    uint64_t addr;
    uint64_t n;
};

struct berth_kv_cut {
    const struct berth_kv_row *rows;
    const uint64_t *keys;             /* by session: another whenever its KV was made anew */
    const struct berth_kv_list *free; /* lists of page ids */
    const struct berth_kv_list *tree; /* one list of token slots; null if not given */
    uint32_t nrows;
    uint32_t nsessions;
    uint32_t nfree; /* 0 if not given */
    /* 1 if every row that holds pages is in `rows`, and rows, lists and tree are complete and of
     * one moment. Without it nothing is said across rows and lists. */
    uint32_t whole;
    uint32_t digest_pages_max; /* sealed pages to digest in this audit, or 0 */
    uint32_t zero;
    uint64_t stream; /* CUstream whose work up to here makes the books true; 0 is the default one */
};

uint32_t berth_kv_abi(void);

/* The last error of this thread; valid until the thread's next call. Never null. */
const char *berth_kv_error(void);

/* Opens a pool. `fatbin` is the path of the kernels; null in host memory. As long as the handle is
 * open, r2t and buffers stay where they are. 0 or an error. */
int32_t berth_kv_open(const struct berth_kv_pool *pool, const char *fatbin, berth_kv *out);

/* Begins an audit. The lists stay alive and unchanged until finish or abandon returns. */
int32_t berth_kv_begin(berth_kv handle, const struct berth_kv_cut *cut);

/* 1 when the copy is made, 0 while not, or an error. */
int32_t berth_kv_ready(berth_kv handle);

/* Ends the audit: `rows[i]` has `versions[i]` now. Answers the report's bytes, or an error. After
 * BERTH_KV_SMALL, BERTH_KV_BUSY and BERTH_KV_STATE the audit goes on; after others it is over. */
int64_t berth_kv_finish(berth_kv handle, const uint32_t *rows, const uint64_t *versions, uint32_t n,
                        uint8_t *buffer, uint64_t capacity);

/* Bytes that are enough for the report of an audit of so many sessions. */
uint64_t berth_kv_report_bytes_max(uint32_t nsessions);

/* Gives the audit under way up, if there is one; waits until nothing reads its lists. */
int32_t berth_kv_abandon(berth_kv handle);

/* Closes the handle; gives an audit under way up. A call that runs about it still ends well. */
int32_t berth_kv_close(berth_kv handle);

/* The row table: what a process beside the engine needs to audit it by CUDA IPC.
 *
 * One step of the scheduler is: berth_kv_table_begin before the first change of r2t is enqueued,
 * then the changes, then berth_kv_table_done with the rows as they are after them. */

typedef uint64_t berth_kv_table;

struct berth_kv_table_row {
    uint32_t row;
    uint32_t len;
    uint32_t session; /* its number: small, the same for all rows of the session */
    uint32_t zero;
    uint64_t version; /* another whenever a step has rewritten any of [0, len) */
    uint64_t key;     /* names the session to the reader */
};

/* Makes the file at `path`, which has to be on a file system in memory: a ring of 2 to 64 tables (8
 * are plenty) of up to rows_max rows. Exports r2t; BERTH_KV_UNSHARED where it is mapped by handles.
 * In host memory nothing is exported, and the table tells rows only. */
int32_t berth_kv_table_open(const struct berth_kv_pool *pool, const char *fatbin, const char *path,
                            uint32_t tables, uint32_t rows_max, berth_kv_table *out);

/* The changes of a step begin on `stream`, which stays until the table is closed. */
int32_t berth_kv_table_begin(berth_kv_table table, uint64_t stream);

/* They have all been enqueued. */
int32_t berth_kv_table_done(berth_kv_table table, const struct berth_kv_table_row *rows, uint32_t n,
                            uint64_t stream);

/* Takes the table back. r2t may be freed when no reader has it mapped any more. */
int32_t berth_kv_table_close(berth_kv_table table);

#ifdef __cplusplus
}
#endif

#endif
