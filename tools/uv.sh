# To be sourced: uv, which resolves requirements with the settings of pip.

# install_uv PYTHON FOLDER: install uv into FOLDER, from the index of PYTHON's pip, which replaces PyPI. Further indexes
# and folders of wheels do not count.
install_uv() {
    local pip=("$1" -m pip --disable-pip-version-check)
    "${pip[@]}" install -qq --target "$2" uv
    UV_DEFAULT_INDEX=${PIP_INDEX_URL:-$("${pip[@]}" config get global.index-url 2>/dev/null || echo https://pypi.org/simple)}
    export UV_DEFAULT_INDEX UV_NO_CONFIG=1
    [[ -z ${PIP_CERT:-} ]] || export SSL_CERT_FILE=${SSL_CERT_FILE:-$PIP_CERT}
    unset UV_FIND_LINKS UV_INDEX UV_EXTRA_INDEX_URL UV_INDEX_URL
}
