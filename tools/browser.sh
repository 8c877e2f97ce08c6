#!/usr/bin/env bash
# Chromium and its driver, for the tests that open pages of `hpcrl report`.
#   tools/browser.sh install          with apt; needs root
set -euo pipefail

usage="expected tools/browser.sh install"
packages=(chromium chromium-driver)
programs=(chromium chromedriver)

die() { printf 'browser.sh: error: %s\n' "$*" >&2; exit "${code:-1}"; }

source "$(dirname "${BASH_SOURCE[0]}")/apt.sh"

case ${1:-} in
install) install_packages Chromium ;;
*) code=2 die "$usage" ;;
esac
