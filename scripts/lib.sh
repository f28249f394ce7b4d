# Shared by the scripts beside it (bash 3.2 and later, which is what macOS ships); sourced, never run.
#
# setup EXTRAS   makes $venv fit this checkout with the given extras of pyproject.toml
#                ("demo", "dev", "dev,demo") and sets $python to its interpreter.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
python="$venv/bin/python"
stamp="$venv/loragraph.stamp"
log="$venv/install.log"

say() { printf 'loragraph: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

# install_hint DEBIAN FEDORA MACOS: one line for each system, so nobody has to search.
install_hint() {
  say "  Debian, Ubuntu:  sudo apt-get install $1"
  say "  Fedora:          sudo dnf install $2"
  say "  macOS:           $3"
}

# Exit status 0: Python >= 3.11 that can make a virtual environment and compile extensions;
# 3: too old; 4: parts are missing that Debian and others package apart, named on stdout;
# anything else: it does not run at all.
probe_python() {
  "$1" - 2>/dev/null <<'PY'
import importlib.util, os, sys, sysconfig
if sys.version_info < (3, 11):
    sys.exit(3)
lacks = []
if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
    lacks.append("the modules venv and ensurepip")
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    lacks.append("the C headers (Python.h)")
if lacks:
    print(" and ".join(lacks), "of Python %d.%d" % sys.version_info[:2])
    sys.exit(4)
PY
}

# Sets $base_python. The versions that constraints.txt was tested with come first.
find_python() {
  local candidate candidates="python3.11 python3.12 python3.13 python3"
  local status lacks incomplete="" missing="" too_old="" minor
  [ -z "${LORAGRAPH_PYTHON:-}" ] || candidates=""
  # Unquoted: the list splits into words; the user's own path, quoted, does not.
  for candidate in ${LORAGRAPH_PYTHON:+"$LORAGRAPH_PYTHON"} $candidates; do
    status=0
    lacks="$(probe_python "$candidate")" || status=$?
    case $status in
      0) base_python="$candidate"; return ;;
      3) too_old="$candidate" ;;
      4) [ -n "$incomplete" ] || { incomplete="$candidate"; missing="$lacks"; } ;;
    esac
  done
  if [ -n "$incomplete" ]; then
    minor="$("$incomplete" -c 'import sys; print(sys.version_info[1])')"
    say "missing: $missing ($incomplete). To install:"
    install_hint "python3.$minor-venv python3.$minor-dev" "python3.$minor python3.$minor-devel" \
      "brew install python@3.13"
  elif [ -n "$too_old" ]; then
    say "missing: Python 3.11 or later (found $("$too_old" --version 2>&1)). To install:"
    install_hint "python3.11 python3.11-venv python3.11-dev" "python3.13 python3.13-devel" \
      "brew install python@3.13"
  elif [ -n "${LORAGRAPH_PYTHON:-}" ]; then
    die "missing: LORAGRAPH_PYTHON=$LORAGRAPH_PYTHON does not run"
  else
    say "missing: Python 3.11 or later. To install:"
    install_hint "python3 python3-venv python3-dev" "python3 python3-devel" \
      "brew install python@3.13"
  fi
  say "or name another one with LORAGRAPH_PYTHON=/path/to/python"
  exit 1
}

# need_compiler LANGUAGE SUFFIX SOURCE PREFERRED CANDIDATE...: one of them must compile and link.
# PREFERRED is the user's CC or CXX, which may carry arguments; the build obeys it, so it alone counts.
need_compiler() {
  local language="$1" suffix="$2" source="$3" preferred="$4" candidate dir found=""
  shift 4
  dir="$(mktemp -d)"
  printf '%s\n' "$source" > "$dir/probe.$suffix"
  if [ -n "$preferred" ]; then
    # shellcheck disable=SC2086 # CC="ccache gcc" is two words on purpose
    if $preferred "$dir/probe.$suffix" -o "$dir/probe" >/dev/null 2>&1; then found=1; fi
  else
    for candidate in "$@"; do
      # macOS has stubs that exist without Xcode's tools, so presence on PATH proves nothing.
      if "$candidate" "$dir/probe.$suffix" -o "$dir/probe" >/dev/null 2>&1; then found=1; break; fi
    done
  fi
  rm -rf "$dir"
  [ -z "$found" ] || return 0
  if [ -n "$preferred" ]; then
    say "missing: a working $language compiler ($preferred, from the environment, cannot build a program)"
  else
    say "missing: a $language compiler (none of $* can build a program)"
  fi
  say "To install:"
  install_hint build-essential "gcc gcc-c++" "xcode-select --install"
  exit 1
}

need_compilers() {
  need_compiler C c '#include <stdio.h>
int main(void) { puts(""); return 0; }' "${CC:-}" cc gcc clang
  need_compiler C++ cpp '#include <vector>
int main() { std::vector<int> v(1); return v[0]; }' "${CXX:-}" c++ g++ clang++
}

# All that decides what an installation consists of, as one hash. The checkout's place counts too:
# a virtual environment and an editable install both hold absolute paths.
fingerprint() {
  "$1" - "$root" <<'PY'
import hashlib, pathlib, sys

root = pathlib.Path(sys.argv[1])
files = [root / name for name in ("pyproject.toml", "setup.py", "constraints.txt")]
kernels = root / "src/loragraph/kernels"
files += sorted(
    path
    for path in kernels.rglob("*")
    # The binding's other Python files need no compiler, and _kernels.c is what the build writes.
    if path.name == "build.py" or path.suffix in {".c", ".h"} and path.name != "_kernels.c"
)
files += [root / "src/loragraph/ggml" / name for name in ("build.py", "declarations.py")]
digest = hashlib.sha256(f"{sys.version}\0{root}\0".encode())
for path in files:
    content = path.read_bytes()
    digest.update(f"{path.relative_to(root)}\0{len(content)}\0".encode() + content)
print(digest.hexdigest())
PY
}

# same_python BASE: the environment was made by a Python of exactly that version.
same_python() {
  [ "$("$1" -c 'import sys; print(sys.version)' 2>/dev/null)" = \
    "$("$python" -c 'import sys; print(sys.version)' 2>/dev/null)" ]
}

# fits EXTRAS: the environment runs, has this fingerprint, and holds at least these extras.
fits() {
  local have_print="" have_extras="" extra
  [ -x "$python" ] && [ -f "$stamp" ] || return 1
  # Who names a Python means that one.
  [ -z "${LORAGRAPH_PYTHON:-}" ] || same_python "$LORAGRAPH_PYTHON" || return 1
  { read -r have_print && read -r have_extras; } < "$stamp" || return 1
  [ "$have_print" = "$(fingerprint "$python" 2>/dev/null)" ] || return 1
  for extra in ${1//,/ }; do
    case ",$have_extras," in *",$extra,"*) ;; *) return 1 ;; esac
  done
}

# logged COMMAND...: quiet; on failure the end of the log tells why.
logged() {
  if ! "$@" >> "$log" 2>&1; then
    say "failed: $*"
    tail -n 40 "$log" >&2
    die "the whole log: $log"
  fi
}

setup() {
  local extras="$1" old_extras="" extra
  if fits "$extras"; then return; fi

  find_python
  need_compilers
  # A venv is kept when only the sources changed; its extras are kept with it.
  if [ -x "$python" ] && [ -f "$stamp" ] && same_python "$base_python"; then
    old_extras="$(sed -n 2p "$stamp")"
    for extra in ${old_extras//,/ }; do
      case ",$extras," in *",$extra,"*) ;; *) extras="$extras,$extra" ;; esac
    done
    say "updating $venv"
    : > "$log"
  else
    say "making $venv with $("$base_python" --version)"
    rm -rf "$venv"
    "$base_python" -m venv "$venv" || die "failed: $base_python -m venv $venv"
    : > "$log"
  fi
  rm -f "$stamp" # until the installation below is complete

  (
    # Relative file names in this directory: nothing that pip could split at a space.
    cd "$root"
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
    # The pinned pip first: older ones cannot pin what a build takes.
    logged "$python" -m pip install -c constraints.txt pip
    say "installing the packages of constraints.txt and compiling the kernels"
    if ! "$python" -c 'import llama_cpp' >/dev/null 2>&1; then
      say "(the first time llama-cpp-python is compiled: 4 to 6 minutes on two cores)"
    fi
    logged "$python" -m pip install -c constraints.txt --build-constraint constraints.txt \
      -e ".[$extras]"
  )
  # The stamp is the last thing written, so an interrupted installation never fits.
  { fingerprint "$python"; printf '%s\n' "$extras"; } > "$stamp"
  say "ready"
}
