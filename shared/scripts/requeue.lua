-- requeue(entry) -> 'ok', 'gone' (no such dead letter), 'cut' (not kept whole) or 'in use'
--
-- Sends a dead letter again as a bare push: a new life of its id, in which the error of the first is forgotten.
local entry = ARGV[1]

local letter = redis.call('XRANGE', DEAD, entry, entry)[1]
if not letter then return 'gone' end
local fields = {}
for i = 1, #letter[2], 2 do fields[letter[2][i]] = letter[2][i + 1] end
if #fields.payload == 0 or tonumber(fields.size) > #fields.payload then return 'cut' end

local known = fields.id ~= '' and read(fields.id, 'state', 'husk') or {}
if known.husk or known.state and known.state ~= 'error' then return 'in use' end
local ok, said = pcall(cjson.decode, fields.payload)
local list = ok and type(said) == 'table' and LISTS[said.priority] or REQUESTS
if list ~= REQUESTS then poke() end
redis.call('RPUSH', list, fields.payload)
if fields.id ~= '' then redis.call('DEL', request_key(fields.id), reply_key(fields.id), tokens_key(fields.id)) end
redis.call('XDEL', DEAD, entry)
return 'ok'
