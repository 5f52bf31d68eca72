// Streams as clocks: which work is certain to be over when other work starts.
//
// NOTE [ The worst timing ]
//
// Kernels run at once, on the host, but a GPU may run the work of two streams in any order that their events
// allow. So each stream counts the work launched on it, and has a clock: for every stream, how much of its work is
// certain to be over. Waiting for an event joins the clock that the event was recorded with; waiting on the host
// joins the host's clock, which all later work starts from. What is not certain to be over counts as late: reading
// its results gives NaN, and is a race (memory.h).
//
// NOTE [ The engine's own race ]
//
// One gradient may go to nodes on two streams. If one of them has more gradients to add, torch's engine adds in place
// once it holds the last reference (`can_accumulate_inplace` in input_buffer.cpp, torch 2.13). References are those of
// the host: the other stream may still read. The engine waits for the stream that made the gradient, not for that one.
// So a plain model that reads a tensor on two streams can race; whoever holds the gradient, as a hook can, prevents it.
#pragma once

#include <c10/core/Stream.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

using c10::DeviceIndex;
using c10::DeviceType;

constexpr DeviceIndex kDevices = 2;
constexpr c10::StreamId kStreams = 33;  // of a device: its own, and those that new ones share, as on CUDA

using Queue = std::pair<DeviceIndex, c10::StreamId>;       // a stream of a device
using Clock = std::array<int64_t, kDevices * kStreams>;  // by stream, how many pieces of work are over

size_t index_of(Queue queue) { return queue.first * kStreams + queue.second; }

// One piece of work: a kernel or a copy.
struct Launch {
  Queue queue;
  int64_t number = 0;  // in its stream, from 1
  std::string op;
};

struct Event {
  std::chrono::steady_clock::time_point at;
  Clock clock;
  int64_t graph = 0;  // that it was captured into; 0: none
};

std::recursive_mutex device_mutex;  // of what follows, and of what memory.h keeps
Clock host_clock{};
std::array<Clock, kDevices * kStreams> clocks{};  // by stream
std::vector<std::string> races;

thread_local DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream[kDevices] = {};

Queue current_queue(DeviceIndex device) { return {device, current_stream[device]}; }
Queue queue_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

void join(Clock& clock, const Clock& other) {
  for (size_t i = 0; i < clock.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

bool is_over(const Launch& launch, const Clock& clock) {
  return launch.number <= clock[index_of(launch.queue)];
}

// The clock of the next work of a stream.
Clock& clock_of(Queue queue) {
  auto& clock = clocks[index_of(queue)];
  join(clock, host_clock);
  return clock;
}

Launch launch(Queue queue, std::string op) {
  return {queue, ++clock_of(queue)[index_of(queue)], std::move(op)};
}

void synchronize(Queue queue) { join(host_clock, clock_of(queue)); }

void synchronize(DeviceIndex device) {
  for (c10::StreamId stream = 0; stream < kStreams; stream++) synchronize(Queue{device, stream});
}

std::string name(Queue queue) {
  return "stream " + std::to_string(queue.second) + " of cuda:" + std::to_string(queue.first);
}

}  // namespace
