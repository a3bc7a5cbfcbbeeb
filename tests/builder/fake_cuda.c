/* A CUDA driver of two GPUs, as far as a look at a machine goes. The environment says how it fails. */
#include <stdio.h>
#include <stdlib.h>

int cuInit(unsigned flags) {
    const char *result = getenv("FAKE_CUDA_INIT");
    return flags != 0 ? 1 : result ? atoi(result) : 0;
}
int cuDriverGetVersion(int *version) { *version = 13010; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 10 + ordinal; return ordinal > 1; }
int cuDeviceGetName(char *name, int length, int device) {
    return snprintf(name, length, "NVIDIA Fake %d", device) < 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? (device == 10 ? 8 : 12) : attribute == 76 ? (device == 10 ? 9 : 0) : -1;
    return getenv("FAKE_CUDA_ATTRIBUTE") ? 999 : 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)(device + 14) << 30; return 0; }
int cuDeviceGetPCIBusId(char *id, int length, int device) { return snprintf(id, length, "0000:%d:00.0", device) < 0; }
int cuGetErrorString(int error, const char **text) {
    *text = error == 803 ? "system has unsupported display driver / cuda driver combination" : NULL;
    return *text == NULL;
}
