#!/usr/bin/env bash
# Compares this project's HPSv2 score with the package's own model code, preprocessing and tokenizer, on the same small
# random weights, in an environment of its own:
#
#   bash tests/parity/hpsv2_package.sh [folder of the environment, by default a new temporary one]
#
# The package is installed without its pins (pytest 7.2.0, protobuf < 4). Its wheel lacks the vocabulary that it opens when
# imported: open_clip ships the same file.
set -euo pipefail
environment=${1:-$(mktemp -d)}
cd "$(dirname "$0")/../.."

python3 -m venv "$environment"
"$environment/bin/pip" install --quiet torch torchvision open_clip_torch requests pytest pytest-timeout
"$environment/bin/pip" install --quiet --no-deps hpsv2==1.2.0 clint args webdataset braceexpand
site=$("$environment/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
cp "$site/open_clip/bpe_simple_vocab_16e6.txt.gz" "$site/hpsv2/src/open_clip/"

"$environment/bin/python" -m pytest -s tests/parity/test_hpsv2_package.py
