#!/bin/bash
# A rank that fails ends the others; all are started again, and go on from the newest checkpoint.
set -euo pipefail
%{command}
