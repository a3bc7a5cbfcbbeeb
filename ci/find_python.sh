#!/usr/bin/env bash
# Print a Python 3.10-3.12 that can make virtual environments and has a shared libpython, which Triton's Python backend loads.
set -u
found_without=""
for candidate in ${PYTHON:-} python3.11 python3.12 python3.10 python3; do
  answer=$("$candidate" - 2>/dev/null <<'PY'
import ctypes.util, pathlib, sys, sysconfig
import ensurepip, venv
if not (3, 10) <= sys.version_info[:2] < (3, 13):
    sys.exit(1)
name = f"libpython{sys.version_info[0]}.{sys.version_info[1]}.so"
folders = [sysconfig.get_config_var("LIBDIR"), pathlib.Path(sys.base_prefix) / "lib"]
folders.append(pathlib.Path("/usr/lib") / (sysconfig.get_config_var("MULTIARCH") or ""))
shared = any(list(pathlib.Path(f).glob(name + "*")) for f in folders if f)
print("shared" if shared else "static", sys.executable)
PY
  ) || continue
  case "$answer" in
    "shared "*) echo "${answer#shared }"; exit 0 ;;
    "static "*) found_without=${found_without:-${answer#static }} ;;
  esac
done
if [ -n "$found_without" ]; then
  echo "error: $found_without has no shared libpython, which Triton's Python backend loads." >&2
  echo "Install it (Debian, Ubuntu: apt-get install libpython3-dev; pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install 3.11)," >&2
else
  echo "error: no Python 3.10, 3.11 or 3.12 with the venv module was found." >&2
  echo "Install one (Debian, Ubuntu: apt-get install python3 python3-venv libpython3-dev)," >&2
fi
echo "or name another interpreter: make setup PYTHON=/path/to/python3.11" >&2
exit 2
