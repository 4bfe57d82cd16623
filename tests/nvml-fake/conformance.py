"""Checks the fake with NVIDIA's own binding (nvidia-ml-py), against the state the fake was given.

    LD_LIBRARY_PATH=FOLDER python3 conformance.py FOLDER

FOLDER holds the library under the driver's name for it, and `state.json`.
"""

import json
import re
import sys
from pathlib import Path

import pynvml as nvml


def error_of(call, *arguments):
    """Returns the error code of a call; 0 if the call succeeds."""
    try:
        call(*arguments)
    except nvml.NVMLError as error:
        return error.value
    return 0


def check(what, found, wanted):
    if found != wanted:
        sys.exit(f"{what}: the binding reads {found!r}, the state says {wanted!r}")


def symbols():
    sources = "".join(file.read_text() for file in (Path(__file__).parent / "src").glob("*.rs"))
    exported = set(re.findall(r"\b(nvml[A-Z]\w+)\(", sources))
    # The binding initialises with another symbol.
    known = {"nvmlInit_v2", *re.findall(r'"(nvml\w+)"', Path(nvml.__file__).read_text())}
    check("symbols that NVIDIA's binding doesn't know", sorted(exported - known), [])
    check("there are symbols", len(exported) > 40, True)


def system(state):
    check("driver", nvml.nvmlSystemGetDriverVersion(), state["driver_version"])
    check("CUDA", nvml.nvmlSystemGetCudaDriverVersion_v2(), 13000)
    check("count", nvml.nvmlDeviceGetCount(), len(state["gpus"]))
    no_index = error_of(nvml.nvmlDeviceGetHandleByIndex, 99)
    check("an index that isn't", no_index, nvml.NVML_ERROR_INVALID_ARGUMENT)
    no_uuid = error_of(nvml.nvmlDeviceGetHandleByUUID, "GPU-none")
    check("a UUID that isn't", no_uuid, nvml.NVML_ERROR_NOT_FOUND)


def board(index, gpu):
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    check("uuid", nvml.nvmlDeviceGetUUID(device), gpu["uuid"])
    same = nvml.nvmlDeviceGetHandleByPciBusId(gpu["pci_address"])
    check("index by address", nvml.nvmlDeviceGetIndex(same), index)
    check("address", nvml.nvmlDeviceGetPciInfo(device).busId, gpu["pci_address"])
    memory = nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)
    wanted = [gpu["memory_total"], gpu["memory_reserved"], gpu["memory_used"]]
    check("memory", [memory.total, memory.reserved, memory.used], wanted)
    check("memory's sum", memory.free, wanted[0] - wanted[1] - wanted[2])
    processes = nvml.nvmlDeviceGetComputeRunningProcesses_v3(device)
    wanted = [(process["pid"], process["bytes"]) for process in gpu["processes"]]
    check("processes", [(one.pid, one.usedGpuMemory) for one in processes], wanted)
    rates = nvml.nvmlDeviceGetUtilizationRates(device)
    check("utilisation", [rates.gpu, rates.memory], gpu["utilization"])
    check("power", nvml.nvmlDeviceGetPowerUsage(device), gpu["power_milliwatts"])
    energy = nvml.nvmlDeviceGetTotalEnergyConsumption(device)
    check("energy", energy, gpu["energy_millijoules"])
    celsius = nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)
    check("temperature", celsius, gpu["temperature_celsius"])
    clock = nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM)
    check("memory clock", clock, gpu["clocks_mhz"][2])
    uncorrected = nvml.nvmlDeviceGetTotalEccErrors(
        device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    )
    check("uncorrected errors", uncorrected, gpu["ecc_errors"][1])
    fields(device, gpu["fields"])
    check("missing NUMA node", error_of(nvml.nvmlDeviceGetNumaNodeId, device), 3)


def fields(device, wanted):
    ids = [int(id) for id in wanted] + [999]
    values = nvml.nvmlDeviceGetFieldValues(device, ids)
    for value in values[:-1]:
        unsigned = value.valueType == nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
        found = value.value.ullVal if unsigned else value.value.sllVal
        check(f"field {value.fieldId}", found, wanted[str(value.fieldId)])
    check("an unknown field", values[-1].nvmlReturn, nvml.NVML_ERROR_NOT_SUPPORTED)


def slices(gpu):
    device = nvml.nvmlDeviceGetHandleByUUID(gpu["uuid"])
    check("MIG mode", nvml.nvmlDeviceGetMigMode(device), [1, 1])
    check("slices at most", nvml.nvmlDeviceGetMaxMigDeviceCount(device), 7)
    for index, wanted in gpu["slices"].items():
        slice = nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, int(index))
        check("a slice's uuid", nvml.nvmlDeviceGetUUID(slice), wanted["uuid"])
        parent = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(slice)
        check("its GPU", nvml.nvmlDeviceGetUUID(parent), gpu["uuid"])
        power = error_of(nvml.nvmlDeviceGetPowerUsage, slice)
        check("its power", power, nvml.NVML_ERROR_NOT_SUPPORTED)
    missing = error_of(nvml.nvmlDeviceGetMigDeviceHandleByIndex, device, 6)
    check("a slice that isn't", missing, nvml.NVML_ERROR_NOT_FOUND)


def events(device):
    events = nvml.nvmlEventSetCreate()
    nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, events)
    timeout = error_of(nvml.nvmlEventSetWait_v2, events, 1)
    check("a wait in vain", timeout, nvml.NVML_ERROR_TIMEOUT)
    nvml.nvmlEventSetFree(events)


def gpm(device, metrics):
    check("GPM", nvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice, 1)
    first, second = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
    nvml.nvmlGpmSampleGet(device, first)
    nvml.nvmlGpmSampleGet(device, second)
    request = nvml.c_nvmlGpmMetricsGet_t()
    request.version = nvml.NVML_GPM_METRICS_GET_VERSION
    request.sample1, request.sample2 = first, second
    request.numMetrics = len(metrics) + 1
    for place, id in enumerate([*metrics, 300]):
        request.metrics[place].metricId = int(id)
    nvml.nvmlGpmMetricsGet(request)
    for place, wanted in enumerate(metrics.values()):
        check("a metric", request.metrics[place].value, wanted)
    check("no metric", request.metrics[len(metrics)].nvmlReturn, nvml.NVML_ERROR_NOT_SUPPORTED)


def main():
    state = json.loads((Path(sys.argv[1]) / "state.json").read_text())
    symbols()
    before = error_of(nvml.nvmlDeviceGetCount)
    check("a call before the first", before, nvml.NVML_ERROR_UNINITIALIZED)
    nvml.nvmlInit()
    system(state)
    for index, gpu in state["gpus"].items():
        if not gpu["lost"]:
            board(int(index), gpu)
    first = nvml.nvmlDeviceGetHandleByIndex(0)
    slices(state["gpus"]["0"])
    events(first)
    gpm(first, state["gpus"]["0"]["gpm"])
    lost = error_of(nvml.nvmlDeviceGetHandleByIndex, 1)
    check("a lost GPU", lost, nvml.NVML_ERROR_GPU_IS_LOST)
    missing = error_of(nvml.nvmlDeviceGetFanSpeed, first)
    check("a missing symbol", missing, nvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    nvml.nvmlShutdown()
    print("agrees")


main()
