// A device in host memory whose tensors cannot be mixed with the CPU's, as CUDA's cannot: every operator first checks
// where its tensors are, then runs the CPU's kernel on the same memory. It counts what a host waits for and launches, and
// a copy to the host that does not block has its content only after the host has synchronised.

#include <ATen/ATen.h>
#include <torch/library.h>

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>

#include <cstring>
#include <set>

namespace {

constexpr auto kKind = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kKind, 0);

// As `Counts` in load.py.
struct Counts {
  int64_t to_device, bytes_to_device, to_host, bytes_to_host, synchronisations, launches;
};
Counts counts{};

// Copies to the host that have been queued: the host's tensor, and the content it will have.
std::vector<std::pair<at::Tensor, at::Tensor>> queued;

void finish_queued() {
  for (auto& [target, content] : queued) target.copy_(content);
  queued.clear();
}

void synchronise() {
  ++counts.synchronisations;
  finish_queued();
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? c10::alloc_cpu(bytes) : nullptr;
    return {data, data, &c10::free_cpu, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
DeviceAllocator allocator;
REGISTER_ALLOCATOR(kKind, &allocator);

// Host memory that the device can read while the host goes on.
struct PinnedAllocator final : c10::Allocator {
  static std::set<const void*>& addresses() {
    static std::set<const void*> found;
    return found;
  }
  static void free(void* data) {
    addresses().erase(data);
    c10::free_cpu(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes ? bytes : 1);
    addresses().insert(data);
    return {data, data, &free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

// One device, one stream.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kKind; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream stream() const noexcept { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getNewStream(c10::Device, int = 0) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { synchronise(); }
  void synchronizeEvent(void*) const override { synchronise(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronise(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  auto data = allocator.allocate(bytes);
  if (const auto kept = std::min(bytes, storage->nbytes())) std::memcpy(data.mutable_get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator pinned;
    return &pinned;
  }
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::addresses().count(data); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

bool is_on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kKind; }

// A CPU tensor on a device tensor's memory.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!is_on_device(tensor)) return tensor;
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  c10::Storage same(c10::Storage::use_byte_size_t(), storage->nbytes(),
                    c10::DataPtr(storage->mutable_data(), c10::Device(c10::kCPU)), c10::GetAllocator(c10::kCPU), true);
  auto found = at::detail::make_tensor<c10::TensorImpl>(std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  found.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return found;
}

at::Tensor device_tensor(c10::Storage storage, const at::Tensor& like) {
  auto found = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), like.dtype());
  found.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return found;
}

void delete_storage(void* storage) { delete static_cast<c10::Storage*>(storage); }

// The CPU's result as a device tensor: a view of an argument where it is one, else the owner of the memory.
at::Tensor on_device(const at::Tensor& result, const std::vector<at::Tensor>& arguments) {
  if (!result.defined() || result.device().type() != c10::kCPU) return result;
  const void* data = result.storage().data();
  for (const auto& argument : arguments) {
    if (data && is_on_device(argument) && argument.storage().data() == data) return device_tensor(argument.storage(), result);
  }
  auto* owner = new c10::Storage(result.storage());
  c10::DataPtr memory(owner->mutable_data(), owner, &delete_storage, kDevice);
  return device_tensor(c10::Storage(c10::Storage::use_byte_size_t(), result.storage().nbytes(), std::move(memory), &allocator, true), result);
}

// What the CPU's kernel made of an argument that it wrote to: another size, another layout.
void take_back(const at::Tensor& written, const at::Tensor& argument) {
  auto* storage = argument.storage().unsafeGetStorageImpl();
  if (written.storage().data() != storage->data() || written.storage().nbytes() != storage->nbytes()) {
    const auto bytes = written.storage().nbytes();
    auto data = allocator.allocate(bytes);
    if (bytes) std::memcpy(data.mutable_get(), written.storage().data(), bytes);
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(bytes);
  }
  if (written.sizes() != argument.sizes() || written.strides() != argument.strides() || written.storage_offset() != argument.storage_offset())
    argument.unsafeGetTensorImpl()->set_sizes_and_strides(written.sizes(), written.strides(), written.storage_offset());
}

// Operators that take indices from the CPU, as CUDA's do.
const std::set<std::string> kTakesIndices{"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"};

void check(const std::string& name, const at::Tensor& tensor, bool is_index) {
  if (!tensor.defined() || is_on_device(tensor) || tensor.dim() == 0 || is_index) return;
  TORCH_CHECK(false, name, ": expected all tensors on ", kDevice, ", found one of shape ", tensor.sizes(), " on ", tensor.device());
}

// Operators whose result's size depends on numbers on the device, so that the host waits for them.
const std::set<std::string> kWaits{"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
                                   "aten::bincount", "aten::equal", "aten::repeat_interleave"};

// Counts a call of a kernel; a view is none.
void count(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  const auto& name = schema.operator_name().name;
  bool is_view = !schema.returns().empty();
  for (const auto& result : schema.returns()) is_view = is_view && result.alias_info() && !result.alias_info()->isWrite();
  if (is_view) return;
  ++counts.launches;
  bool waits = kWaits.count(name);
  if (kTakesIndices.count(name))
    for (const auto& index : stack[stack.size() - schema.arguments().size() + 1].toOptionalTensorVector())
      waits = waits || (index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte));
  if (waits) synchronise();
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  count(op, *stack);
  const auto& schema = op.schema();
  const auto& name = schema.operator_name().name;
  const auto num_arguments = schema.arguments().size();
  const auto first = stack->size() - num_arguments;
  std::vector<at::Tensor> given, lent;  // device tensors among the arguments, and the CPU's on their memory
  std::vector<at::Tensor> written;      // by the order of arguments that are written to, lists flattened
  auto lend = [&](const at::Tensor& tensor, bool is_index, bool is_written) {
    check(name, tensor, is_index);
    if (is_written) written.push_back(tensor);
    if (!is_on_device(tensor)) return tensor;
    for (size_t i = 0; i < given.size(); ++i)
      if (given[i].is_same(tensor)) return lent[i];
    given.push_back(tensor);
    lent.push_back(on_cpu(tensor));
    return lent.back();
  };
  for (size_t i = 0; i < num_arguments; ++i) {
    auto& value = (*stack)[first + i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool writes = alias && alias->isWrite();
    const bool indices = kTakesIndices.count(name) && value.isList();
    if (value.isTensor()) {
      value = lend(value.toTensor(), false, writes);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(lend(tensor, indices, writes));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional<at::Tensor>(lend(*tensor, indices, writes)) : std::nullopt);
      value = list;
    } else if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (const auto& tensor : written)
    for (size_t i = 0; i < given.size(); ++i)
      if (given[i].is_same(tensor)) take_back(lent[i], tensor);
  const auto results = schema.returns().size();
  size_t next = 0;
  for (size_t i = 0; i < results; ++i) {
    auto& value = (*stack)[stack->size() - results + i];
    const auto* alias = schema.returns()[i].alias_info();
    if (value.isTensor()) {
      if (alias && alias->isWrite() && next < written.size()) value = written[next++];
      else value = on_device(value.toTensor(), given);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(on_device(tensor, given));
      value = list;
    }
  }
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device>,
                 std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// The only operators that cross between the two.
void transfer(const at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  if (is_on_device(target) && is_on_device(source)) {
    ++counts.launches;
  } else if (is_on_device(target)) {
    ++counts.to_device;
    counts.bytes_to_device += target.nbytes();
    finish_queued();  // copies run in order, so this one may read what another writes
    if (!non_blocking || !PinnedAllocator::addresses().count(source.storage().data())) synchronise();
  } else {
    ++counts.to_host;
    counts.bytes_to_host += target.nbytes();
    if (!non_blocking) {
      synchronise();
    } else if (target.numel()) {
      queued.emplace_back(target, on_cpu(source).clone());
      target.view(at::kByte).fill_(0xff);
      return;
    }
  }
  on_cpu(target).copy_(on_cpu(source));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  transfer(self, source, non_blocking);
  return self;
}

at::Tensor _copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  transfer(target, self, non_blocking);
  return target;
}

at::Scalar _local_scalar_dense(const at::Tensor& self) {
  ++counts.to_host;
  counts.bytes_to_host += self.nbytes();
  synchronise();
  return at::_local_scalar_dense(on_cpu(self));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  TORCH_CHECK(storage.device() == kDevice, "set_: a storage on ", storage.device(), " in a tensor on ", kDevice);
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  if (stride.empty()) {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    self.unsafeGetTensorImpl()->set_storage_offset(offset);
  } else {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(storage), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", _copy_from);
  m.impl("_local_scalar_dense", _local_scalar_dense);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  // Which torch has for some chips only; elsewhere it is made of others and waits.
  m.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace

extern "C" void register_hooks() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

extern "C" void read_counts(int64_t* into) { std::memcpy(into, &counts, sizeof(counts)); }

extern "C" void synchronise_device() { synchronise(); }
