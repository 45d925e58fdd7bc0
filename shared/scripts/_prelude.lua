-- What all scripts share; the loader puts this text, `_endings.lua` and `_pushes.lua` in front of each of them.
--
-- KEYS[1..12] are the same in every script. The keys of single requests are built from the queue's prefix: their ids come
-- out of lists and sets while the script runs, so nobody could declare them. The hash tag {queue} keeps all of them in one
-- cluster slot. Times are milliseconds of the broker's clock, the only clock there is.
local META, STATS, DEAD, HIGH, REQUESTS, LOW, RESUME, SUSPECTS, LEASES, DEADLINES, WORKERS, SOLO = unpack(KEYS, 1, 12)
local PREFIX = string.match(META, '^(.*)meta$')
local LISTS = { high = HIGH, normal = REQUESTS, low = LOW }

local LAYOUT = '2'
local FORGET_WORKER_AFTER = 3 -- leases without a heartbeat
local CRASHES_BEFORE_SUSPECT = 2
local CRASHES_ALONE_BEFORE_DEAD = 2
local POKE = '~'

local clock = redis.call('TIME')
local now_us = clock[1] * 1000000 + clock[2]
local now = math.floor(now_us / 1000)

local layout = redis.call('HGET', META, 'layout')
if layout and layout ~= LAYOUT then
  return redis.error_reply('LAYOUT ' .. layout .. ' ' .. LAYOUT)
end

local function request_key(id) return PREFIX .. 'request:' .. id end
local function reply_key(id) return PREFIX .. 'reply:' .. id end
local function tokens_key(id) return PREFIX .. 'tokens:' .. id end
local function own_key(worker) return PREFIX .. 'own:' .. worker end
local function worker_key(worker) return PREFIX .. 'worker:' .. worker end
local function idempotency_key(key) return PREFIX .. 'idem:' .. key end

-- A whole number as text: Lua alone would write a fence as 1.79e+15.
local function integer(number) return string.format('%.0f', number) end

local function count(counter) redis.call('HINCRBY', STATS, counter, 1) end

-- At maxmemory a script may not begin with a write that needs memory, but it may go on after one that needs none.
-- Whatever frees memory in the end (claim, finish, reclaim, ...) begins with this; enqueue does not.
local function pass_maxmemory() redis.call('DEL', PREFIX .. 'nothing') end

local function write_layout()
  if not layout then redis.call('HSET', META, 'layout', LAYOUT) end
end

-- Fields of a hash by name; a missing one is nil.
local function read_hash(key, ...)
  local values, fields = redis.call('HMGET', key, ...), {}
  for i, name in ipairs({ ... }) do fields[name] = values[i] or nil end
  return fields
end

local function read(id, ...) return read_hash(request_key(id), ...) end

-- Apply `handle` to each run of `width` arguments from ARGV[first] on; one that fails answers 0 and spares the others.
local function each(first, width, total, handle)
  local answers = {}
  for i = 1, total do
    local at = first + (i - 1) * width
    local ok, answer = pcall(handle, unpack(ARGV, at, at + width - 1))
    if not ok then count('script_errors') end
    answers[i] = ok and answer or 0
  end
  return answers
end

-- Idle workers block on the normal list alone: an element that is no request wakes them for what stands elsewhere. It is
-- pushed only where the list is empty, so there is one at most, at the head.
local function poke()
  if redis.call('LLEN', REQUESTS) == 0 then redis.call('RPUSH', REQUESTS, POKE) end
end

-- Pushes whose requests have ended already, and that are still to be met in their lists.
local function husks() return tonumber(redis.call('HGET', META, 'husks') or 0) end

-- How many requests wait, begun before or not.
local function depth()
  local total = 0
  for _, list in ipairs({ HIGH, REQUESTS, LOW, RESUME, SUSPECTS }) do total = total + redis.call('LLEN', list) end
  if redis.call('LINDEX', REQUESTS, 0) == POKE then total = total - 1 end
  return total - husks()
end
