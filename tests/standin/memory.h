// The device's memory, handed out as CUDA's caching allocator does.
//
// Requests are rounded to 512 bytes. Up to 1 MiB they are cut from segments of 2 MiB, below 10 MiB from segments of
// 20 MiB, and larger ones have a segment of their own, rounded to 2 MiB. A free block serves requests of the stream
// that it was allocated on. It is split unless less than 512 bytes (of a small block) or no more than 1 MiB (of a
// large one) would remain, and merges with its free neighbours. Of equally large blocks, that of the oldest segment
// serves a request, as if segments had rising addresses.
//
// The limit is of what the segments take, as on a GPU. A segment for which too little is left is tried once more when
// all segments without an allocated block have been given back. caching_allocator.py has the same rules.
//
// Memory that nothing has written holds NaN, in every floating-point type.
//
// The pool of a graph (capture.h) has segments of its own. What kernels make inside of themselves in a replay is in
// no pool, and counts nowhere.
#pragma once

#include <c10/core/Allocator.h>

#include <map>
#include <set>
#include <unordered_map>

#include "capture.h"

namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kRounding = 512;
constexpr int64_t kSmallRequest = kMiB, kSmallSegment = 2 * kMiB;
constexpr int64_t kLargeRequest = 10 * kMiB, kLargeSegment = 20 * kMiB, kSegmentRounding = 2 * kMiB;
constexpr int kNaN = 0xFF;  // every byte of it
constexpr int64_t kScratch = -1;  // the pool of what counts nowhere

int64_t rounded(int64_t nbytes, int64_t unit) { return (nbytes + unit - 1) / unit * unit; }

struct Block {
  char* address;
  int64_t nbytes;
  DeviceIndex device;
  c10::StreamId stream;  // that it was allocated on
  bool small;
  int64_t pool;             // of a graph; 0: of none
  int64_t segment;          // a later one has a higher number
  Block* before = nullptr;  // in its segment
  Block* after = nullptr;
  bool allocated = false;
  int64_t requested = 0;
  int64_t serial = 0;     // of the allocation
  std::set<Queue> users;  // of record_stream
  Launch writer;
  std::map<Queue, Launch> readers;  // since then; the last of each stream

  Queue queue() const { return {device, stream}; }
  bool is_free() const { return !allocated && users.empty(); }
};

struct FitsBetter {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->pool, a->stream, a->nbytes, a->segment, a->address) <
           std::tie(b->pool, b->stream, b->nbytes, b->segment, b->address);
  }
};

enum Quantity { kAllocation, kSegment, kActive, kAllocatedBytes, kReservedBytes, kActiveBytes, kRequestedBytes, kQuantities };
constexpr const char* kNames[kQuantities] = {
    "allocation", "segment", "active", "allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"};
enum Pool { kAll, kSmall, kLarge, kPools };

struct Counter {
  int64_t current = 0, peak = 0, allocated = 0, freed = 0;

  void add(int64_t amount) {
    current += amount;
    peak = std::max(peak, current);
    (amount > 0 ? allocated : freed) += std::abs(amount);
  }
};

struct Memory {
  std::array<std::array<Counter, kPools>, kQuantities> counters;
  std::set<Block*, FitsBetter> free[kPools];
  std::vector<std::pair<Block*, std::vector<Launch>>> in_use;  // freed, but a stream still works on them
  int64_t limit = int64_t(1) << 50;                            // of reserved bytes
  int64_t allowed = limit;                                     // to this process
  int64_t segments = 0;                                        // so far

  Counter& allocated() { return counters[kAllocatedBytes][kAll]; }
  void count(const Block& block, Quantity quantity, int64_t amount) {
    if (block.pool == kScratch) return;
    counters[quantity][kAll].add(amount);
    counters[quantity][block.small ? kSmall : kLarge].add(amount);
  }
};

Memory memories[kDevices];
std::unordered_map<const void*, Block*> blocks;  // that are allocated, by address
int64_t allocations = 0;                         // so far
int64_t slack_nbytes = 0;                        // that each block is larger than its rounded size
bool reports = true;                             // to torch.profiler; cudaMallocAsync does not

// ---- what runs on a block

Block* block_at(const void* address) {
  auto found = blocks.find(address);
  return found == blocks.end() ? nullptr : found->second;
}

bool ordered(const Launch& earlier, const char* what, const Launch& later, const char* how) {
  if (is_over(earlier, clocks[index_of(later.queue)])) return true;
  races.push_back(later.op + " on " + name(later.queue) + how + earlier.op + " on " + name(earlier.queue) + what);
  return false;
}

// Note that `now` reads the memory; return false if that is a race.
bool read(const void* address, const Launch& now) {
  Block* block = block_at(address);
  if (!block) return true;
  block->readers[now.queue] = now;
  return ordered(block->writer, " writes, without waiting", now, " reads what ");
}

bool write(const void* address, const Launch& now) {
  Block* block = block_at(address);
  if (!block) return true;
  bool right = ordered(block->writer, " writes, without waiting", now, " writes what ");
  for (const auto& entry : block->readers) {
    right &= ordered(entry.second, " reads, without waiting", now, " writes what ");
  }
  block->writer = now;
  block->readers.clear();
  return right;
}

// Note that the block is freed. What its stream launches from here on may get the memory.
void check_free(const Block& block) {
  const Clock& clock = clock_of(block.queue());
  auto check = [&](const Launch& use) {
    if (is_over(use, clock) || block.users.count(use.queue)) return;
    races.push_back("memory of " + name(block.queue()) + " is freed while " + use.op + " on " + name(use.queue) +
                    " uses it, without record_stream");
  };
  check(block.writer);
  for (const auto& entry : block.readers) check(entry.second);
}

// ---- memory of the host that is registered: the device copies from and to it in the order of its streams

struct HostUse {
  const char* end;
  Launch writer;
  std::map<Queue, Launch> readers;
};

std::map<const char*, const char*> registered;  // from the begin of a range to its end
std::map<const char*, HostUse> host_uses;       // by the begin of what a copy wrote

// Note that `now` copies from or to the host; return false if that is a race.
bool use_host(const char* begin, const char* end, bool writes, const Launch& now) {
  auto range = registered.upper_bound(begin);
  if (range == registered.begin() || std::prev(range)->second <= begin) return true;
  bool right = true;
  for (auto it = host_uses.begin(); it != host_uses.end();) {
    auto& use = it->second;
    const bool overlaps = it->first < end && begin < use.end;
    if (overlaps) right &= ordered(use.writer, " writes on the host, without waiting", now, " uses what ");
    if (overlaps && writes) {
      for (const auto& entry : use.readers) {
        right &= ordered(entry.second, " reads on the host, without waiting", now, " writes what ");
      }
      it = host_uses.erase(it);
      continue;
    }
    if (overlaps) use.readers[now.queue] = now;
    ++it;
  }
  if (writes) host_uses[begin] = {end, now, {}};
  return right;
}

// ---- the allocator

void merge(Memory& memory, Block* block, Block* neighbour) {
  if (!neighbour || !neighbour->is_free()) return;
  memory.free[block->small ? kSmall : kLarge].erase(neighbour);
  Block* first = neighbour == block->before ? neighbour : block;
  block->address = first->address;
  block->before = first->before;
  block->after = first == block ? neighbour->after : block->after;
  block->nbytes += neighbour->nbytes;
  if (block->before) block->before->after = block;
  if (block->after) block->after->before = block;
  delete neighbour;
}

void make_free(Memory& memory, Block* block) {
  block->users.clear();
  memory.count(*block, kActive, -1);
  memory.count(*block, kActiveBytes, -block->nbytes);
  merge(memory, block, block->before);
  merge(memory, block, block->after);
  memory.free[block->small ? kSmall : kLarge].insert(block);
}

// Free the blocks on which the host has waited for the last work of other streams.
void free_finished(Memory& memory) {
  auto waiting = std::move(memory.in_use);
  memory.in_use.clear();
  for (auto& [block, uses] : waiting) {
    bool over = true;
    for (const auto& use : uses) over &= is_over(use, host_clock);
    if (over) make_free(memory, block);
    else memory.in_use.emplace_back(block, std::move(uses));
  }
}

void empty_cache(DeviceIndex device) {
  Memory& memory = memories[device];
  synchronize(device);
  free_finished(memory);
  for (auto pool : {kSmall, kLarge}) {
    auto& free_blocks = memory.free[pool];
    for (auto it = free_blocks.begin(); it != free_blocks.end();) {
      Block* block = *it;
      if (block->before || block->after || pools.count(block->pool)) {
        ++it;
        continue;
      }
      it = free_blocks.erase(it);
      memory.count(*block, kSegment, -1);
      memory.count(*block, kReservedBytes, -block->nbytes);
      free(block->address);
      delete block;
    }
  }
}

Block* new_segment(Memory& memory, int64_t nbytes, Queue queue, bool small, int64_t pool) {
  nbytes = small ? kSmallSegment : nbytes < kLargeRequest ? kLargeSegment : rounded(nbytes, kSegmentRounding);
  const int64_t& reserved = memory.counters[kReservedBytes][kAll].current;
  const int64_t most = std::min(memory.limit, memory.allowed);
  if (reserved + nbytes > most) empty_cache(queue.first);
  if (reserved + nbytes > most) return nullptr;
  void* address = nullptr;
  if (posix_memalign(&address, kRounding, nbytes)) return nullptr;
  memset(address, kNaN, nbytes);
  auto* block = new Block{static_cast<char*>(address), nbytes, queue.first, queue.second, small, pool, ++memory.segments};
  memory.count(*block, kSegment, 1);
  memory.count(*block, kReservedBytes, nbytes);
  return block;
}

void split(Memory& memory, Block* block, int64_t nbytes) {
  const int64_t remaining = block->nbytes - nbytes;
  if (block->small ? remaining < kRounding : remaining <= kSmallRequest) return;
  auto* rest = new Block{block->address + nbytes, remaining, block->device, block->stream, block->small,
                         block->pool, block->segment};
  rest->before = block;
  rest->after = block->after;
  if (rest->after) rest->after->before = rest;
  block->after = rest;
  block->nbytes = nbytes;
  memory.free[block->small ? kSmall : kLarge].insert(rest);
}

// Memory becomes NaN, here and where a graph that is captured has come to.
void poison(const Block& block) {
  memset(block.address, kNaN, block.nbytes);
  if (!capture || block.pool != capture->pool) return;
  capture->work.push_back({[address = block.address, nbytes = block.nbytes] { memset(address, kNaN, nbytes); }});
}

// Return a block, or none if the device has too little memory.
Block* take_block(int64_t requested, Queue queue) {
  Memory& memory = memories[queue.first];
  free_finished(memory);
  const int64_t nbytes = rounded(requested, kRounding) + slack_nbytes;
  const bool small = nbytes <= kSmallRequest;
  auto& free_blocks = memory.free[small ? kSmall : kLarge];
  const int64_t pool = is_captured(queue) ? capture->pool : in_replay ? kScratch : 0;
  Block least{nullptr, nbytes, queue.first, queue.second, small, pool, 0};
  auto found = free_blocks.lower_bound(&least);
  Block* block;
  if (found != free_blocks.end() && (*found)->stream == queue.second && (*found)->pool == pool) {
    block = *found;
    free_blocks.erase(found);
  } else if (!(block = new_segment(memory, nbytes, queue, small, pool))) {
    return nullptr;
  }
  split(memory, block, nbytes);
  block->allocated = true;
  block->requested = requested;
  block->serial = ++allocations;
  if (pool) poison(*block);
  block->writer = {queue, clock_of(queue)[index_of(queue)], "an earlier op"};
  block->readers.clear();
  blocks[block->address] = block;
  memory.count(*block, kAllocation, 1);
  memory.count(*block, kActive, 1);
  memory.count(*block, kAllocatedBytes, block->nbytes);
  memory.count(*block, kActiveBytes, block->nbytes);
  memory.count(*block, kRequestedBytes, requested);
  return block;
}

void give_back(Block* block) {
  Memory& memory = memories[block->device];
  if (!block->pool || is_captured(block->queue())) check_free(*block);  // no other work gets what a graph has left
  blocks.erase(block->address);
  poison(*block);
  block->allocated = false;
  memory.count(*block, kAllocation, -1);
  memory.count(*block, kAllocatedBytes, -block->nbytes);
  memory.count(*block, kRequestedBytes, -block->requested);
  std::vector<Launch> uses;
  for (const auto& queue : block->users) uses.push_back({queue, clock_of(queue)[index_of(queue)], ""});
  if (uses.empty()) make_free(memory, block);
  else memory.in_use.emplace_back(block, std::move(uses));
}

void record_stream(const void* address, Queue queue) {
  std::lock_guard<std::recursive_mutex> lock(device_mutex);
  Block* block = block_at(address);
  if (block && block->queue() != queue) block->users.insert(queue);
}

// By device, pool and segment: its bytes, and those of them that are allocated.
std::map<std::tuple<int64_t, int64_t, int64_t>, std::pair<int64_t, int64_t>> segments() {
  std::map<std::tuple<int64_t, int64_t, int64_t>, std::pair<int64_t, int64_t>> found;
  auto add = [&](const Block& block) {
    if (block.pool == kScratch) return;
    auto& [total, allocated] = found[{block.device, block.pool, block.segment}];
    total += block.nbytes;
    allocated += block.allocated ? block.nbytes : 0;
  };
  for (const auto& entry : blocks) add(*entry.second);
  for (const auto& memory : memories) {
    for (auto pool : {kSmall, kLarge}) {
      for (const Block* block : memory.free[pool]) add(*block);
    }
    for (const auto& entry : memory.in_use) add(*entry.first);
  }
  return found;
}

struct CachingAllocator final : c10::Allocator {
  // torch.profiler gets the bytes as a free or an allocation, and what is allocated then.
  static void report(void* address, int64_t nbytes, DeviceIndex device, int64_t total, int64_t reserved) {
    c10::reportMemoryUsageToProfiler(address, nbytes, total, reserved, c10::Device(DeviceType::CUDA, device));
  }

  template <typename Change>
  static void* change(DeviceIndex device, Change make) {
    std::unique_lock<std::recursive_mutex> lock(device_mutex);
    Memory& memory = memories[device];
    const int64_t before = memory.allocated().current;
    void* address = make();
    const int64_t after = memory.allocated().current, reserved = memory.counters[kReservedBytes][kAll].current;
    const bool told = reports;
    lock.unlock();
    if (told) report(address, after - before, device, after, reserved);
    return address;
  }

  static void release(void* address) {
    if (!address) return;
    Block* block;
    {
      std::lock_guard<std::recursive_mutex> lock(device_mutex);
      block = block_at(address);
    }
    change(block->device, [&] {
      give_back(block);
      return address;
    });
  }

  c10::DataPtr allocate(size_t nbytes) override {
    const DeviceIndex device = current_device;
    const c10::Device where(DeviceType::CUDA, device);
    if (!nbytes) return {nullptr, nullptr, &release, where};
    void* address = change(device, [&]() -> void* {
      Block* block = take_block(nbytes, current_queue(device));
      if (!block) C10_THROW_ERROR(OutOfMemoryError, "CUDA out of memory (stand-in).");
      return block->address;
    });
    return {address, address, &release, where};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { memcpy(to, from, nbytes); }
};

CachingAllocator allocator;

}  // namespace
