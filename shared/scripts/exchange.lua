-- exchange(worker, slots, ack, lease, ttl, max_payload, finishes, checkpoints,
--          finishes × (id, fence, reason, body, start, count, ids, text),
--          checkpoints × (id, fence, start, count, ids, text))
--   -> {owned, claims, finished, checkpointed}
--
-- One step of one worker: save what was generated, post what is finished, claim what fits into the free slots.
--   owned         id, fence, id, fence, ...: all that the worker owns now; it drops whatever is not among them
--   claims        {id, fence, payload, deliveries, queue_ms, age_ms, ids, text} with a fence above `ack`, the highest that
--                 the worker has received: a repeated call gets the same ones and takes nothing new
--   finished      1 done (now or before), 0 fenced
--   checkpointed  1 stored (now or before), 0 fenced, -1-n "the broker has n tokens, send from there"
pass_maxmemory()
local worker, slots, ack = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local lease, ttl, max_payload = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local finishes, checkpoints = tonumber(ARGV[7]), tonumber(ARGV[8])
local FIRST, FINISH_WIDTH, CHECKPOINT_WIDTH = 9, 8, 6
local own = KEYS[13]
local lapses = integer(now + lease)
local MOST_MEMBERS = 1000 -- that go into one command: Lua cannot unpack any number

-- Append tokens to the stream of a request if they begin where it ends.
local function append(id, request, start, total, ids, text)
  local known = tonumber(request.tokens or 0)
  -- Without token ids: the text that a worker held back until the end.
  if start + total <= known and (total > 0 or text == '') then return 1 end
  if start ~= known then return -1 - known end
  redis.call('XADD', tokens_key(id), '*', 'start', start, 'ids', ids, 'text', text, 'fence', request.fence)
  redis.call('HSET', request_key(id), 'tokens', start + total)
  return 1
end

local ended = {} -- worker -> ids that it owns no longer

local function finish_one(id, fence, reason, body, start, total, ids, text)
  local request = read(id, 'state', 'fence', 'worker', 'sha1', 'stream', 'tokens', 'due', 'kept_until', 'reply_to')
  if request.fence ~= fence then
    count('fenced')
    return 0
  end
  if request.state ~= 'running' then return 1 end
  -- A gap here means that the broker has lost tokens that it once had: the reply, which has all of them, still counts.
  if request.stream then append(id, request, tonumber(start), tonumber(total), ids, text) end
  finish(id, request, reason, body, ttl)
  ended[request.worker] = ended[request.worker] or {}
  table.insert(ended[request.worker], id)
  return 1
end

-- One command for as many members of a set as Lua can pass on at once.
local function on_members(command, key, members)
  for first = 1, #members, MOST_MEMBERS do
    redis.call(command, key, unpack(members, first, math.min(first + MOST_MEMBERS - 1, #members)))
  end
end

local function disown_ended()
  for owner, ids in pairs(ended) do
    on_members('ZREM', LEASES, ids)
    on_members('ZREM', own_key(owner), ids)
  end
end

local function checkpoint_one(id, fence, start, total, ids, text)
  local request = read(id, 'state', 'fence', 'tokens')
  if request.fence ~= fence then
    count('fenced')
    return 0
  end
  if request.state ~= 'running' then return 1 end
  return append(id, request, tonumber(start), tonumber(total), ids, text)
end

local function delivery(id, request)
  local ids, text = '', ''
  if request.tokens then ids, text = saved_output(id) end
  local queue_ms, age_ms = request.claimed - request.enqueued, now - request.enqueued
  local payload, deliveries = assert(request.payload), assert(tonumber(request.deliveries))
  return { id, tonumber(request.fence), payload, deliveries, queue_ms, age_ms, ids, text }
end

local free, fence, claims = 0, 0, {}
local new_leases, new_own = {}, {} -- score, id, score, id, ...

-- Add a delivery to the answer; a request that somebody has damaged is ended rather than claimed for ever.
local function answer_with(id, request)
  local ok, answer = pcall(delivery, id, request)
  if ok then
    claims[#claims + 1] = answer
    return true
  end
  count('script_errors')
  redis.call('ZREM', LEASES, id)
  redis.call('ZREM', own, id)
  refuse(id, {}, '', 'the state of the request is damaged', 'internal', ttl)
end

-- Answer once more with what the worker owns and has not heard of; true if there is anything.
local function answer_again()
  local unseen = redis.call('ZRANGEBYSCORE', own, '(' .. ack, '+inf')
  for _, id in ipairs(unseen) do
    answer_with(id, read(id, 'fence', 'payload', 'deliveries', 'enqueued', 'claimed', 'tokens'))
  end
  return #unseen > 0
end

-- Begin a waiting request, or end it if it was called off meanwhile. `new` goes into its hash as well; nil: nothing is in
-- its hash yet.
local function claim(id, request, new)
  local reason = called_off(request)
  if reason then return end_early(id, request, reason, ttl) end
  fence, free = fence + 1, free - 1
  request.state, request.fence, request.worker = 'running', integer(fence), worker
  request.deliveries, request.claimed = integer((request.deliveries or 0) + 1), request.claimed or integer(now)
  if not answer_with(id, request) then return end
  local fields = new or flat(request)
  redis.call('HSET', request_key(id), 'state', 'running', 'fence', request.fence, 'worker', worker, 'deliveries',
    request.deliveries, 'claimed', request.claimed, unpack(fields))
  local n = #new_own
  new_leases[n + 1], new_leases[n + 2], new_own[n + 1], new_own[n + 2] = lapses, id, request.fence, id
end

-- An id that ended, or whose second life waits for its own turn, is left alone.
local function claim_resumed(id, alone)
  local request = read_whole(id)
  if request.state ~= 'waiting' or not request.deliveries then return end
  local new = { 'claimed_tokens', request.tokens or '0' }
  if alone then new = { 'claimed_tokens', request.tokens or '0', 'alone', '1' } end
  claim(id, request, new)
end

local function claim_pushed(payload)
  local id, request, written = take_push(payload, max_payload, ttl)
  if not id then return end
  request.payload = payload
  claim(id, request, written and { 'payload', payload } or nil)
end

local function claim_item(item, claim_one)
  if pcall(claim_one, item) then return end
  count('script_errors')
  rubbish('the request could not be claimed', '', item)
end

-- Take from the head of a list of ids until the slots are full.
local function claim_from(list, claim_one)
  for _ = 1, 2 * free + 16 do
    local item = free > 0 and redis.call('LPOP', list)
    if not item then return end
    claim_item(item, claim_one)
  end
end

-- Whose turn it is, of sixteen: while all three lists are full, none of them starves.
local TURNS = { HIGH, HIGH, HIGH, REQUESTS, HIGH, HIGH, HIGH, REQUESTS, HIGH, HIGH, HIGH, REQUESTS, HIGH, HIGH, HIGH, LOW }

-- Take new requests until the slots are full; bounded, however much of it is rubbish. An empty list gives its turn to the
-- first that is not; the only one that is not gets as many turns as there are slots.
local function claim_in_turns(turn)
  local waiting, order, taken, most = {}, { HIGH, REQUESTS, LOW }, 0, 2 * free + 16
  for _, list in ipairs(order) do waiting[list] = redis.call('LLEN', list) end
  local total = waiting[HIGH] + waiting[REQUESTS] + waiting[LOW]
  while free > 0 and total > 0 and most > 0 do
    local list = TURNS[(turn + taken) % #TURNS + 1]
    for _, other in ipairs(order) do
      if waiting[list] == 0 then list = other end
    end
    local run = waiting[list] == total and math.min(free, total, most) or 1
    for _, item in ipairs(redis.call('LPOP', list, run)) do
      if item ~= POKE then taken = taken + 1 end
      claim_item(item, claim_pushed)
    end
    waiting[list], total, most = waiting[list] - run, total - run, most - run
  end
  if taken > 0 then redis.call('HSET', META, 'turn', (turn + taken) % #TURNS) end
end

-- A suspect runs with nothing beside it: one worker of the queue at a time, the holder of `solo`, takes nothing else until
-- it is empty, and then the suspect. True: the worker gets nothing else now.
local function claim_suspect(held)
  local alone = held == 1 and redis.call('HGET', request_key(redis.call('ZRANGE', own, 0, 0)[1]), 'alone')
  if not alone and redis.call('EXISTS', SUSPECTS) == 0 then return false end
  local holder = redis.call('GET', SOLO)
  if holder and holder ~= worker then return alone end
  redis.call('SET', SOLO, worker, 'PX', lease)
  if held == 0 then
    free = 1
    claim_from(SUSPECTS, function(id) claim_resumed(id, true) end)
  end
  return true
end

local function claim_new()
  local held = redis.call('ZCARD', own)
  free = slots - held
  if meta.suspended or free <= 0 or redis.call('EXISTS', RESUME, SUSPECTS, HIGH, REQUESTS, LOW) == 0 then return end
  -- A replica that took over may lack the last fences, and its clock may lag: the worker knows those that it got.
  fence = math.max(tonumber(meta.fence or 0), now_us, tonumber(ack))
  redis.call('HSET', META, 'fence', integer(fence + free))
  write_layout()
  if claim_suspect(held) then return end
  claim_from(RESUME, claim_resumed)
  claim_in_turns(tonumber(meta.turn or 0))
end

-- Checkpoints first: of a request that has both in one call, the last tokens follow those of the checkpoint.
local checkpointed = each(FIRST + finishes * FINISH_WIDTH, CHECKPOINT_WIDTH, checkpoints, checkpoint_one)
local finished = each(FIRST, FINISH_WIDTH, finishes, finish_one)

disown_ended()
if not answer_again() then claim_new() end
on_members('ZADD', LEASES, new_leases)
on_members('ZADD', own, new_own)
return { redis.call('ZRANGE', own, 0, -1, 'WITHSCORES'), claims, finished, checkpointed }
