/*
 * Replaces the CUDA driver library on a machine that has none.
 *
 * The engine's kernel wheel is linked against libcuda.so.1 and uses one symbol of it. Without the
 * library the wheel cannot be loaded, although nothing on a CPU ever calls that function. A caller
 * gets the error that the driver is not initialized.
 */

enum { NOT_INITIALIZED = 3 /* CUDA_ERROR_NOT_INITIALIZED */ };

int cuPointerGetAttribute(void *value, int attribute, unsigned long long pointer) {
    (void)value;
    (void)attribute;
    (void)pointer;
    return NOT_INITIALIZED;
}
