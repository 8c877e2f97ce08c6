#!/usr/bin/env bash
# Chromium and its driver, for the tests that open pages of `hpcrl report`.
#   tools/browser.sh install          with apt; needs root
set -euo pipefail

usage="expected tools/browser.sh install"
packages=(chromium chromium-driver)
programs=(chromium chromedriver)

die() { printf 'browser.sh: error: %s\n' "$*" >&2; exit "${code:-1}"; }

missing() {
    local program
    for program in "${programs[@]}"; do
        command -v "$program" >/dev/null || { echo "$program"; return; }
    done
}

install_packages() {
    [[ -n $(missing) ]] || return 0
    command -v apt-get >/dev/null || die "no $(missing) here and no apt-get to install it; install Chromium by hand"
    [[ $(id -u) == 0 ]] || die "no $(missing) here; have root run: apt-get install ${packages[*]}"
    export DEBIAN_FRONTEND=noninteractive
    local get=(apt-get install -y -qq --no-install-recommends "${packages[@]}")
    "${get[@]}" >/dev/null 2>&1 || { apt-get update -qq >/dev/null && "${get[@]}" >/dev/null; } ||
        die "'${get[*]}' failed; see above"
}

case ${1:-} in
install) install_packages ;;
*) code=2 die "$usage" ;;
esac
