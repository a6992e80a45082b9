"""A CUDA driver that knows what a Hopper is and does nothing: enough for JAX's plugin to compile, not to run.

It says yes to everything, answers a few questions about the device, and writes down the program that it is
handed. Its functions are those of the cuda.h that comes with NVIDIA's packages.
"""

import re
import subprocess
from pathlib import Path

PROGRAM = "MACHINE_CODE_PROGRAM"  # the environment variable that says where the program goes

ANSWERS = r"""
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef long Result;

Result cuGetErrorString(int error, const char **out) { *out = "no driver"; return 0; }
Result cuGetErrorName(int error, const char **out) { *out = "NO_DRIVER"; return 0; }
Result cuDriverGetVersion(int *out) { *out = 13000; return 0; }
Result cuDeviceGetCount(int *out) { *out = 1; return 0; }
Result cuDeviceGet(int *out, int number) { *out = 0; return 0; }
Result cuDeviceGetName(char *out, int size, int device) { strncpy(out, "NVIDIA H200", size); return 0; }
Result cuCtxGetDevice(int *out) { *out = 0; return 0; }
Result cuCtxGetCurrent(void **out) { *out = (void *)1; return 0; }

Result cuDeviceGetAttribute(int *out, int attribute, int device) {
  switch (attribute) {
    case 75: *out = 9; break;        /* compute capability, major */
    case 16: *out = 132; break;      /* multiprocessors */
    case 1: case 2: case 3: *out = 1024; break;  /* threads of a block */
    case 4: *out = 64; break;
    case 5: *out = 2147483647; break;  /* blocks of a grid */
    case 6: case 7: *out = 65535; break;
    case 10: *out = 32; break;       /* threads of a warp */
    case 12: case 82: *out = 65536; break;  /* registers of a block and of a multiprocessor */
    case 8: *out = 49152; break;     /* shared memory: of a block, of a multiprocessor, by request */
    case 81: *out = 233472; break;
    case 97: *out = 232448; break;
    case 111: *out = 1024; break;
    case 39: *out = 2048; break;
    case 106: *out = 32; break;
    default: *out = 0;
  }
  return 0;
}

/* A program is an ELF file in memory: its end is the end of the last thing that it holds. */
static void write_down(const unsigned char *program) {
  const char *path = getenv("MACHINE_CODE_PROGRAM");
  if (!path || memcmp(program, "\177ELF", 4)) return;
  unsigned long sections = *(unsigned long *)(program + 40), headers = *(unsigned long *)(program + 32);
  unsigned short size = *(unsigned short *)(program + 58), count = *(unsigned short *)(program + 60);
  unsigned short header = *(unsigned short *)(program + 54), many = *(unsigned short *)(program + 56);
  unsigned long end = sections + (unsigned long)size * count;
  if (headers + (unsigned long)header * many > end) end = headers + (unsigned long)header * many;
  for (int i = 0; i < count; i++) {
    const unsigned char *section = program + sections + i * size;
    unsigned long at = *(unsigned long *)(section + 24), length = *(unsigned long *)(section + 32);
    if (*(unsigned *)(section + 4) != 8 && at + length > end) end = at + length;
  }
  FILE *file = fopen(path, "wb");
  if (file) { fwrite(program, 1, end, file); fclose(file); }
}

Result cuModuleLoadData(void **out, const void *program) { write_down(program); *out = (void *)2; return 0; }
Result cuModuleLoadDataEx(void **out, const void *program) { return cuModuleLoadData(out, program); }
Result cuModuleGetFunction(void **out, void *module, const char *name) { *out = (void *)3; return 0; }
Result cuGetProcAddress(const char *name, void **out, int version, unsigned long flags) {
  *out = dlsym(RTLD_DEFAULT, name); return *out ? 0 : 500;
}
Result cuGetProcAddress_v2(const char *name, void **out, int version, unsigned long flags, void *status) {
  return cuGetProcAddress(name, out, version, flags);
}
"""


def build(header: Path, folder: Path) -> Path:
    """Compiles the driver as folder/libcuda.so.1, for the functions that `header` (cuda.h) declares.

    Raises:
      OSError: no C compiler. CalledProcessError: it refuses.
    """
    text = header.read_text()
    names = set(re.findall(r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(", text))
    names |= {
        found
        for pair in re.findall(r"#\s*define\s+(cu[A-Z]\w+)\s+\w*\(?(cu[A-Z]\w+)", text)
        for found in pair
    }
    names |= {name + suffix for name in names for suffix in ("_v2", "_v3", "_ptsz", "_ptds")}
    names -= set(re.findall(r"^Result (\w+)", ANSWERS, re.MULTILINE))
    yes = "".join(f"Result {name}(void) {{ return 0; }}\n" for name in sorted(names))
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(ANSWERS + yes)
    name = f"-Wl,-soname,{library.name}"  # by which the plugin asks for it
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", name, "-o", library, source, "-ldl"], check=True)
    return library
