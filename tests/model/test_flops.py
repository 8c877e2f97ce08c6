from hpcrl.model.sizes import peak_of


def test_peak_of_a_device_by_its_name():
    assert peak_of("NVIDIA H200") == peak_of("NVIDIA H100 80GB HBM3") == peak_of("NVIDIA GH200 480GB") == 989e12
    assert peak_of("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_of("NVIDIA H20") == 148e12
    assert peak_of("AMD Instinct MI300X") is None
