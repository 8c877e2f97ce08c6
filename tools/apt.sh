# To be sourced by a script that has `packages`, of apt, `programs` that they bring, and `die`.

# missing: the first of `programs` that is not there
missing() {
    local program
    for program in "${programs[@]}"; do
        PATH=$PATH:/usr/sbin:/sbin command -v "$program" >/dev/null || { echo "$program"; return; }
    done
}

# install_packages WHAT: install what is missing; WHAT is named where there is no apt. Needs root.
install_packages() {
    [[ -n $(missing) ]] || return 0
    command -v apt-get >/dev/null || die "no $(missing) here and no apt-get to install it; install $1 by hand"
    [[ $(id -u) == 0 ]] || die "no $(missing) here; have root run: apt-get install ${packages[*]}"
    export DEBIAN_FRONTEND=noninteractive
    local get=(apt-get install -y -qq --no-install-recommends "${packages[@]}")
    "${get[@]}" >/dev/null 2>&1 || { apt-get update -qq >/dev/null && "${get[@]}" >/dev/null; } ||
        die "'${get[*]}' failed; see above"
}
