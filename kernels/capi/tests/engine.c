/* An engine with one page size and two streaming sessions that share a prefix in the radix tree. It
 * is audited through berth_kv.h. `engine <case> [<driver> <fatbin>]` plants one fault, and writes
 * reports to standard output: each as its length, uint64_t, and its bytes. With a driver, the pool is
 * on that driver's device 0. Exits 1 and names the check if the ABI doesn't behave as expected. */
#include "berth_kv.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAGE 4
#define PAGES 16
#define STRIDE 32
#define ROWS 4
#define PAGE_BYTES 64

static int32_t r2t[ROWS * STRIDE];
static _Alignas(16) uint8_t k[PAGES * PAGE_BYTES], v[PAGES * 2 * PAGE_BYTES];
static int64_t free_pages[PAGES + 4], released[1], tree[PAGES * PAGE];
static uint64_t nfree, ntree;

static void expect(int ok, const char *what) {
    if (!ok) {
        fprintf(stderr, "%s; last error: %s\n", what, berth_kv_error());
        exit(1);
    }
}

static void set_row(uint32_t row, const int32_t *pages, int n) {
    for (int i = 0; i < n * PAGE; i++) {
        r2t[row * STRIDE + i] = pages[i / PAGE] * PAGE + i % PAGE;
    }
}

static void report(berth_kv handle, const struct berth_kv_snapshot *snapshot, uint64_t version_2) {
    uint32_t rows[] = {1, 2};
    uint64_t versions[] = {11, version_2};
    uint64_t capacity = berth_kv_report_bytes_max(snapshot->nsessions);
    uint8_t *buffer = malloc(capacity);

    expect(berth_kv_begin(handle, snapshot) == 0, "begin");
    expect(berth_kv_begin(handle, snapshot) == BERTH_KV_BUSY, "a second audit began");
    expect(berth_kv_finish(handle, rows, versions, 2, buffer, capacity) == BERTH_KV_STATE,
           "finished unseen");
    while (berth_kv_ready(handle) == 0) {
    }
    expect(berth_kv_ready(handle) == 1, "ready");
    expect(berth_kv_finish(handle, rows, versions, 2, buffer, 16) == BERTH_KV_SMALL,
           "wrote into a small buffer");
    int64_t n = berth_kv_finish(handle, rows, versions, 2, buffer, capacity);
    expect(n > 0, "finish");
    uint64_t length = (uint64_t)n;
    fwrite(&length, sizeof length, 1, stdout);
    fwrite(buffer, 1, length, stdout);
    free(buffer);
}

static void misuse(berth_kv handle, const struct berth_kv_snapshot *snapshot,
                   const struct berth_kv_pool *pool) {
    uint8_t byte;
    berth_kv other = 0;
    struct berth_kv_pool odd = *pool;
    struct berth_kv_snapshot wrong = *snapshot;
    struct berth_kv_row row = snapshot->rows[0];

    expect(berth_kv_open(NULL, NULL, &other) == BERTH_KV_INVALID, "opened nothing");
    expect(berth_kv_open(pool, NULL, NULL) == BERTH_KV_INVALID, "opened to nowhere");
    odd.page_tokens = 3;
    expect(berth_kv_open(&odd, NULL, &other) == BERTH_KV_INVALID, "opened pages of 3");
    expect(strstr(berth_kv_error(), "3 tokens") != NULL, "an error without its reason");
    odd = *pool;
    odd.r2t = 0;
    expect(berth_kv_open(&odd, NULL, &other) == BERTH_KV_INVALID, "opened a null table");
    odd = *pool;
    odd.nbuffers = 1u << 20;
    odd.buffers = NULL;
    expect(berth_kv_open(&odd, NULL, &other) == BERTH_KV_INVALID, "opened null buffers");
    odd = *pool;
    odd.device = 0;
    expect(berth_kv_open(&odd, NULL, &other) == BERTH_KV_INVALID, "opened without kernels");
    int32_t answer = berth_kv_open(&odd, "/nowhere/kv.fatbin", &other);
    expect(answer == BERTH_KV_DEVICE || answer == BERTH_KV_INVALID, "opened a device");
    expect(strlen(berth_kv_error()) > 0, "no device, and no reason");
    odd.device = -2;
    expect(berth_kv_open(&odd, "/nowhere/kv.fatbin", &other) == BERTH_KV_INVALID,
           "opened device -2");
    expect(other == 0, "a handle beside an error");
    expect(berth_kv_begin(handle, NULL) == BERTH_KV_INVALID, "began nothing");
    row.session = 7;
    wrong.rows = &row;
    wrong.nrows = 1;
    expect(berth_kv_begin(handle, &wrong) == BERTH_KV_INVALID, "took a session without a key");
    row = snapshot->rows[0];
    row.row = ROWS;
    expect(berth_kv_begin(handle, &wrong) == BERTH_KV_INVALID, "took a row outside the table");
    wrong = *snapshot;
    wrong.keys = NULL;
    expect(berth_kv_begin(handle, &wrong) == BERTH_KV_INVALID, "took null keys");
    wrong = *snapshot;
    wrong.tree = NULL;
    expect(berth_kv_begin(handle, &wrong) == BERTH_KV_INVALID, "took no tree");
    expect(berth_kv_ready(handle) == BERTH_KV_STATE, "ready without an audit");
    expect(berth_kv_finish(handle, NULL, NULL, 0, &byte, 1) == BERTH_KV_STATE, "finished nothing");
    expect(berth_kv_abandon(handle) == 0, "nothing to abandon is no error");
    expect(berth_kv_begin(handle, snapshot) == 0, "begin");
    while (berth_kv_ready(handle) == 0) {
    }
    expect(berth_kv_finish(handle, NULL, NULL, 0, NULL, 1 << 20) == BERTH_KV_INVALID,
           "wrote to null");
    expect(berth_kv_abandon(handle) == 0, "abandon");
    expect(berth_kv_ready(handle) == BERTH_KV_STATE, "ready after abandoning");
    expect(berth_kv_close(handle + 1) == BERTH_KV_INVALID, "closed what was never open");
}

int main(int argc, char **argv) {
    const char *plant = argc > 1 ? argv[1] : "";
    const char *fatbin = argc > 3 ? argv[3] : NULL;
    struct berth_kv_buffer buffers[] = {{(uint64_t)(uintptr_t)k, PAGE_BYTES},
                                        {(uint64_t)(uintptr_t)v, 2 * PAGE_BYTES}};
    struct berth_kv_pool pool = {PAGE, PAGES, (uint64_t)(uintptr_t)r2t, ROWS, STRIDE,
                                 buffers, 2,  fatbin ? 0 : BERTH_KV_HOST};
    struct berth_kv_row rows[] = {{1, 18, 0, 16, 8, 0, 11}, {2, 14, 1, 12, 8, 0, 12}};
    uint64_t keys[] = {100, 200};
    int32_t one[] = {1, 2, 3, 4, 5}, two[] = {1, 2, 6, 7};

    /* Pages 1, 2 and 8 are in the tree; 3 to 5, 6 and 7 are private; the others are free. */
    for (int64_t page = 9; page < PAGES; page++) {
        free_pages[nfree++] = page;
    }
    for (int64_t slot = 0; slot < PAGE; slot++) {
        tree[ntree++] = PAGE + slot;
        tree[ntree++] = 2 * PAGE + slot;
        tree[ntree++] = 8 * PAGE + slot;
    }
    for (int i = 0; i < PAGES * PAGE_BYTES; i++) {
        k[i] = (uint8_t)i, v[i] = (uint8_t)(i * 7), v[PAGES * PAGE_BYTES + i] = (uint8_t)(i * 3);
    }
    if (!strcmp(plant, "aliased")) {
        two[3] = 5;
        free_pages[nfree++] = 7;
    } else if (!strcmp(plant, "leaked")) {
        nfree--;
    } else if (!strcmp(plant, "double_free")) {
        free_pages[nfree++] = 9;
    } else if (!strcmp(plant, "free_held")) {
        free_pages[nfree++] = 4;
    } else if (!strcmp(plant, "free_entry")) {
        free_pages[nfree++] = -3;
    }
    set_row(1, one, 5);
    set_row(2, two, 4);

    struct berth_kv_list free_lists[] = {{(uint64_t)(uintptr_t)free_pages, nfree},
                                         {(uint64_t)(uintptr_t)released, 0}};
    struct berth_kv_list tree_list = {(uint64_t)(uintptr_t)tree, ntree};
    struct berth_kv_snapshot snapshot = {rows, keys, free_lists, &tree_list, 2, 2, 2, 64, 0};
    berth_kv handle = 0;

    expect(berth_kv_abi() == BERTH_KV_ABI, "header and library are of different versions");
    expect(strlen(berth_kv_error()) == 0, "an error before any call");
    if (fatbin) {
        expect(dlopen(argv[2], RTLD_NOW | RTLD_GLOBAL) != NULL, "the driver");
    }
    expect(berth_kv_open(&pool, fatbin, &handle) == 0, "open");
    if (!strcmp(plant, "misuse")) {
        misuse(handle, &snapshot, &pool);
    } else {
        report(handle, &snapshot, !strcmp(plant, "moved") ? 13 : 12);
        if (!strcmp(plant, "changed")) {
            v[2 * 6 * PAGE_BYTES + 5] ^= 1;
        }
        report(handle, &snapshot, 12);
    }
    expect(berth_kv_close(handle) == 0, "close");
    expect(berth_kv_close(handle) == BERTH_KV_INVALID, "closed twice");
    expect(berth_kv_begin(handle, &snapshot) == BERTH_KV_INVALID, "began on a closed handle");
    return 0;
}
