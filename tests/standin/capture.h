// Work that is captured into a graph, as by cudaStreamBeginCapture.
//
// NOTE [ Capture ]
//
// Between its begin and its end, a capture records the work of the streams that take part in it: the one that it began
// on, and each stream that waits for an event of one that takes part. A piece of work is a kernel or a copy on fixed
// addresses. What is allocated on these streams comes from the graph's pool, which serves nobody else.
//
// Kernels run at once here too, since the CPU's kernels find out the sizes of what they make. A GPU runs nothing until
// the graph is replayed, so nothing of it may be left when the capture ends: memory from before the capture gets its
// contents back, and the graph's own memory becomes NaN. What the host learns of the contents in between is an error:
// it waits for nothing while a capture is under way. So is an end with a stream that the first one has not waited for.
//
// A replay runs the work in the order of its launches. Blocks become NaN where they were allocated and freed.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>

#include "streams.h"

namespace {

// One piece of work. A generator that it draws from is set to `offset` after the replay's first.
struct Work {
  std::function<void()> run;
  at::Generator generator;
  uint64_t offset = 0;
};

// A block from before the capture that its work uses.
struct Outside {
  int64_t serial = 0;  // of the allocation
  bool written = false;
  std::vector<char> contents;  // before the first write
  Launch writer;               // before the capture
  std::map<Queue, Launch> readers;
};

struct Graph {
  int64_t id;
  Queue origin;  // on which the capture began
  int64_t pool;
  int64_t first_serial;  // of what is allocated in the capture
  std::vector<Work> work;
  std::unordered_map<const char*, Outside> outside;                        // by address
  std::map<c10::GeneratorImpl*, std::pair<at::Generator, uint64_t>> draws;  // how far each generator has moved on

  // While it is captured.
  std::set<Queue> queues;
  std::vector<std::pair<at::Tensor, at::Tensor>> host_contents;  // of the host's memory that copies wrote
  std::string invalid;                                          // why it cannot be replayed

  uint64_t& offset_of(const at::Generator& generator) {
    return draws.try_emplace(generator.unsafeGetGeneratorImpl(), generator, 0).first->second.second;
  }
};

std::unique_ptr<Graph> capture;  // under way
std::map<int64_t, int64_t> pools;  // how many graphs use each
int64_t last_graph = 0, last_pool = 0;

// Inside of a kernel that is written in Python: what it launches and waits for is the kernel itself.
thread_local bool in_kernel = false;
thread_local bool in_replay = false;

bool is_captured(Queue queue) { return capture && capture->queues.count(queue); }

bool is_recorded(Queue queue) { return is_captured(queue) && !in_kernel; }

[[noreturn]] void invalidate(const std::string& why) {
  capture->invalid = why;
  TORCH_CHECK(false, "CUDA error: operation not permitted when stream is capturing (stand-in): ", why);
}

// The host is about to wait for the device, or to ask how far it is.
void check_host_may_wait(const std::string& what) {
  std::lock_guard<std::recursive_mutex> lock(device_mutex);
  if (capture && !in_kernel) invalidate(what);
}

}  // namespace
