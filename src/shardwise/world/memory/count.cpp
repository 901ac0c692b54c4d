// Counts torch's host allocations by part, and refuses allocations that would exceed a limit.
//
// In: torch's host allocator, which it wraps. Out: current and peak bytes, by part. Memory that libraries allocate themselves (workspaces
// of oneDNN, Python's objects) does not pass through here and is not counted.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <pthread.h>

#include <array>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

constexpr int kParts = 6;
constexpr int kHost = kParts - 1;  // outside the device: neither in its peak nor under its limit

struct Block {
  int64_t size;
  int part;
};

struct State {
  std::mutex mutex;
  std::unordered_map<void*, Block> blocks;
  std::array<int64_t, kParts> held{};
  std::array<int64_t, kParts> at_peak{};
  int64_t device = 0;
  int64_t peak = 0;
  int64_t limit = 0;  // 0: none
  int64_t refused = 0;
  std::array<int64_t, kParts> at_refusal{};
  int part = kHost;
  c10::Allocator* under = nullptr;
};

State& state() {
  static State* made = new State();  // never destroyed: tensors may be freed at exit
  return *made;
}

// With the mutex held.
void add(State& s, int part, int64_t size) {
  s.held[part] += size;
  if (part == kHost) return;
  s.device += size;
  if (s.device > s.peak) {
    s.peak = s.device;
    s.at_peak = s.held;
  }
}

void release(void* pointer) {
  State& s = state();
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    auto found = s.blocks.find(pointer);
    if (found != s.blocks.end()) {
      add(s, found->second.part, -found->second.size);
      s.blocks.erase(found);
    }
  }
  s.under->raw_deleter()(pointer);
}

struct Counting final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    State& s = state();
    if (size == 0) return s.under->allocate(0);
    {
      std::lock_guard<std::mutex> lock(s.mutex);
      const bool over = s.limit > 0 && s.part != kHost && s.device + static_cast<int64_t>(size) > s.limit;
      if (over) {
        s.refused = static_cast<int64_t>(size);
        s.at_refusal = s.held;
      }
      TORCH_CHECK_WITH(OutOfMemoryError, !over, "device memory limit");
    }
    c10::DataPtr made = s.under->allocate(size);
    if (made.compare_exchange_deleter(s.under->raw_deleter(), &release)) {
      std::lock_guard<std::mutex> lock(s.mutex);
      s.blocks[made.get()] = Block{static_cast<int64_t>(size), s.part};
      add(s, s.part, static_cast<int64_t>(size));
    }
    return made;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

// Memory allocated before a fork is the parent's: the child counts from the fork on. No other thread is counting while a process forks.
void before_fork() { state().mutex.lock(); }

void after_fork() { state().mutex.unlock(); }

void begin_fork() {
  State& s = state();
  s.blocks.clear();
  s.held = s.at_peak = s.at_refusal = {};
  s.device = s.peak = s.limit = s.refused = 0;
  s.part = kHost;
  s.mutex.unlock();
}

}  // namespace

extern "C" {

// Returns 0 if torch's allocator cannot be wrapped.
int shardwise_memory_install() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (s.under != nullptr) return 1;
  c10::Allocator* under = c10::GetCPUAllocator();
  if (under == nullptr || under->raw_deleter() == nullptr) return 0;
  if (pthread_atfork(&before_fork, &after_fork, &begin_fork) != 0) return 0;
  s.blocks.reserve(1 << 14);
  s.under = under;
  c10::SetCPUAllocator(new Counting(), 0);
  return 1;
}

// Counts allocations for `part` from now on; returns the previous part.
int shardwise_memory_part(int part) {
  State& s = state();
  const int before = s.part;
  s.part = part;
  return before;
}

// Moves a block to another part; returns 0 if it was not allocated here.
int shardwise_memory_assign(void* pointer, int part) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  auto found = s.blocks.find(pointer);
  if (found == s.blocks.end()) return 0;
  add(s, found->second.part, -found->second.size);
  found->second.part = part;
  add(s, part, found->second.size);
  return 1;
}

// Adds bytes that were allocated elsewhere.
void shardwise_memory_add(int part, int64_t size) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  add(s, part, size);
}

void shardwise_memory_limit(int64_t limit) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.limit = limit;
  s.refused = 0;
}

void shardwise_memory_forget_peak() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.peak = s.device;
  s.at_peak = s.held;
}

// Writes bytes by part now, at the peak and at the last refusal, and the size that was refused.
void shardwise_memory_read(int64_t* out) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  for (int i = 0; i < kParts; ++i) {
    out[i] = s.held[i];
    out[kParts + i] = s.at_peak[i];
    out[2 * kParts + i] = s.at_refusal[i];
  }
  out[3 * kParts] = s.refused;
}
}
